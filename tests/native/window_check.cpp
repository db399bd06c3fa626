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

namespace {

constexpr int kRanks = 3, kBroken = 1;
constexpr std::size_t kBytes[] = {4096, 8192};
constexpr const char* kNames[] = {"control", "rows"};
constexpr std::size_t kSlack = 8192;  // what a wrong address may reach

std::string broken;
thread_local int current_rank;

bool is_broken(const char* how) { return current_rank == kBroken && broken == how; }

// One rank's windows; of two generations.
struct Memory {
  std::vector<char> bytes[2] = {std::vector<char>(kBytes[0] + kSlack),
                                std::vector<char>(kBytes[1] + kSlack)};
};
Memory memory[2][kRanks];

std::barrier meeting(kRanks);

// Every rank's bytes, by rank, once all ranks are there.
void gather(const void* mine, std::size_t num_bytes, void* all) {
  static std::string messages[kRanks];
  messages[current_rank].assign(static_cast<const char*>(mine), num_bytes);
  meeting.arrive_and_wait();
  auto* to = static_cast<char*>(all);
  for (const std::string& message : messages) {
    std::memcpy(to, message.data(), num_bytes);
    to += num_bytes;
  }
  meeting.arrive_and_wait();
}

char* peer(int window, int rank, int generation) {
  if (is_broken("swapped peers") && rank != 0) rank = 3 - rank;
  if (is_broken("another window")) window = 0;
  if (is_broken("stays behind")) generation = 0;
  char* address = memory[generation][rank].bytes[window].data();
  if (is_broken("wrong own mapping") && rank == current_rank) address += 4096;
  return address;
}

bool is_in_own_window(std::uintptr_t address) {
  const auto contains = [address](const std::vector<char>& bytes) {
    return address - reinterpret_cast<std::uintptr_t>(bytes.data()) < bytes.size();
  };
  const Memory& mine = memory[0][current_rank];
  return contains(mine.bytes[0]) || contains(mine.bytes[1]);
}

void check(int generation) {
  const Agreement agreement([](const void* mine, std::size_t num_bytes, void* all,
                               const char*) { gather(mine, num_bytes, all); },
                            kRanks, "tokens 0 -> 128");
  const auto open = [&]() -> std::string {
    if (is_broken("a step")) throw std::bad_alloc();
    return "";
  };
  agreement.on_all_ranks("opening its windows", open, "a remedy");
  std::vector<WindowView> views;
  for (int window = 0; window < 2; ++window) {
    WindowView view{
        kNames[window], memory[generation][current_rank].bytes[window].data(), kBytes[window], {}};
    for (int rank = 0; rank < kRanks; ++rank) {
      view.peers.push_back(peer(window, rank, generation));
    }
    views.push_back(view);
  }
  check_windows(agreement, views, current_rank, generation, "a remedy");
  for (const WindowView& view : views) {
    for (const std::size_t place : {std::size_t{0}, view.num_bytes - 8}) {
      std::uint64_t word;
      std::memcpy(&word, view.own + place, sizeof(word));
      ncclep::ensure(word != 0, "nobody has written to ", place, " of ", view.name);
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

std::vector<std::uint64_t> load_words(const std::vector<std::uintptr_t>& addresses) {
  std::vector<std::uint64_t> words;
  for (const std::uintptr_t address : addresses) {
    words.push_back(*reinterpret_cast<const std::uint64_t*>(address));
    for (const Memory& of : memory[0]) {
      const auto end = reinterpret_cast<std::uintptr_t>(of.bytes[1].data()) + kBytes[1];
      if (is_broken("the last page is not mapped") && end - address <= 4096) words.back() = 0;
    }
  }
  return words;
}

void store_words(const std::vector<std::uintptr_t>& addresses,
                 const std::vector<std::uint64_t>& words) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (is_broken("stores are lost") && !is_in_own_window(addresses[i])) continue;
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
