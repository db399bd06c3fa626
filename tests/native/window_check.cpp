// Runs check_windows and Agreement between threads that stand for ranks, in host memory.  One rank
// is broken as argv[1] says.  Prints what each rank has thrown, one a line.
#include "native/host/window_check.h"

#include <barrier>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "native/device/window_probe.h"

using ncclep::native::Agreement;
using ncclep::native::WindowView;
using Address = std::uintptr_t;

namespace {

constexpr int kRanks = 3, kBroken = 1;
constexpr std::size_t kBytes = 8192, kPage = 4096;

// Of two generations: each rank's windows, and what a wrong address reaches behind them.
alignas(16) char memory[2][kRanks][2][kBytes + kPage];

std::string broken;
thread_local int current_rank;

bool is_broken(const char* how) { return current_rank == kBroken && broken == how; }

// Every rank's bytes, by rank, once all ranks are there.
void gather(const void* mine, std::size_t num_bytes, void* all, const char*) {
  static std::barrier meeting(kRanks);
  static std::string messages[kRanks];
  messages[current_rank].assign(static_cast<const char*>(mine), num_bytes);
  meeting.arrive_and_wait();
  for (int rank = 0; rank < kRanks; ++rank) {
    std::memcpy(static_cast<char*>(all) + rank * num_bytes, messages[rank].data(), num_bytes);
  }
  meeting.arrive_and_wait();
}

char* peer(int window, int rank, int generation) {
  const std::size_t shift = is_broken("wrong own mapping") && rank == current_rank ? kPage : 0;
  if (is_broken("swapped peers") && rank != 0) rank = 3 - rank;
  if (is_broken("another window")) window = 0;
  if (is_broken("stays behind")) generation = 0;
  return memory[generation][rank][window] + shift;
}

void check(int generation) {
  const Agreement agreement(gather, kRanks, "tokens 0 -> 128");
  const auto open = [&] {
    if (is_broken("a step")) throw std::bad_alloc();
  };
  agreement.on_all_ranks("opening its windows", open, "a remedy");
  std::vector<WindowView> views;
  for (const int window : {0, 1}) {
    WindowView& view = views.emplace_back(WindowView{
        window == 0 ? "control" : "rows", memory[generation][current_rank][window], kBytes, {}});
    for (int rank = 0; rank < kRanks; ++rank) view.peers.push_back(peer(window, rank, generation));
  }
  check_windows(agreement, views, current_rank, generation, "a remedy");
  for (const WindowView& view : views) {
    for (const char* word : {view.own, view.own + view.num_bytes - 8}) {
      ncclep::ensure(std::string(word, 8) != std::string(8, '\0'), "an end of ", view.name,
                     " was not written to");
    }
  }
}

void run(int rank, std::string& thrown) {
  current_rank = rank;
  try {
    check(0);
    if (broken == "stays behind") check(1);
  } catch (const ncclep::Error& error) {
    thrown = error.what();
  }
}

}  // namespace

namespace ncclep::native {

std::vector<std::uint64_t> load_words(const std::vector<Address>& addresses) {
  std::vector<std::uint64_t> words;
  for (const Address address : addresses) {
    words.push_back(*reinterpret_cast<const std::uint64_t*>(address));
    for (const auto& of : memory[0]) {
      const auto end = reinterpret_cast<Address>(of[1] + kBytes);
      if (is_broken("the last page is not mapped") && end - address <= kPage) words.back() = 0;
    }
  }
  return words;
}

void store_words(const std::vector<Address>& addresses, const std::vector<std::uint64_t>& words) {
  const auto& own = memory[0][current_rank];
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const bool is_own = addresses[i] - reinterpret_cast<Address>(own) < sizeof(own);
    if (is_broken("stores are lost") && !is_own) continue;
    *reinterpret_cast<std::uint64_t*>(addresses[i]) = words[i];
  }
}

}  // namespace ncclep::native

int main(int argc, char** argv) {
  if (argc > 1) broken = argv[1];
  std::string thrown[kRanks];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(run, rank, std::ref(thrown[rank]));
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& text : thrown) std::puts(text.c_str());
  return 0;
}
