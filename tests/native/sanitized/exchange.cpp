// HostExchange between threads, for sanitizers to watch.
//
// ThreadSanitizer sees addresses, and every end maps the memory at another one.  So with
// NCCLEP_ONE_MAPPING the ends of a process get one mapping (see test_sanitizers.py), and what one
// writes and another reads without order is a race that it reports.
#include "host/exchange.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"

#define REQUIRE(holds) require(holds, #holds)

static void require(bool holds, const char* text) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", text);
  std::abort();
}

#ifdef NCCLEP_ONE_MAPPING
#undef mmap
extern "C" void* mmap(void*, std::size_t, int, int, int, off_t) noexcept;

extern "C" void* mmap_once(void*, std::size_t length, int protection, int flags, int file,
                           off_t) noexcept {
  static std::mutex mutex;
  static std::map<ino_t, void*> mappings;
  const std::lock_guard<std::mutex> alone(mutex);
  struct stat status;
  if (fstat(file, &status) != 0) return MAP_FAILED;
  void*& address = mappings[status.st_ino];
  if (address == nullptr) address = mmap(nullptr, length, protection, flags, file, 0);
  return address;
}
// Another end may use it: it stays.
extern "C" int munmap_once(void*, std::size_t) noexcept { return 0; }
#endif

namespace {

using ncclep::HostExchange;

constexpr double kLong = 60, kShort = 0.1;
const std::string kToken(HostExchange::kTokenBytes, 't');

std::vector<std::unique_ptr<HostExchange>> open_ends(int num_ranks) {
  const int file = memfd_create("ncclep-sanitized", MFD_CLOEXEC);
  REQUIRE(file >= 0);
  std::vector<std::unique_ptr<HostExchange>> ends;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ends.push_back(std::make_unique<HostExchange>(file, kToken, num_ranks, rank));
  }
  close(file);
  return ends;
}

// Exchanges a message; returns all ranks' messages, or nothing after an error.
std::optional<std::string> exchange(HostExchange& end, int num_ranks, const std::string& mine,
                                    double timeout_s) {
  const std::unique_ptr<char[]> all(new char[num_ranks * mine.size()]);  // of its very size
  try {
    end.exchange(mine.data(), mine.size(), all.get(), "a call", timeout_s, [] {});
  } catch (const ncclep::Error&) {
    return std::nullopt;
  }
  return std::string(all.get(), num_ranks * mine.size());
}

// Around what one round moves, and what two do, and nothing; every byte depends on the rank.
std::string message(int rank, int number) {
  constexpr std::size_t kLengths[] = {0, 1, 89, 2047, 2048, 2049, 4096, 8999};
  std::string text(kLengths[number % 8], '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(rank + number + i);
  return text;
}

void exchange_many(HostExchange& end, int num_ranks, int rank, int count) {
  for (int number = 0; number < count; ++number) {
    if ((number + rank) % 8 == 0) usleep(number);
    std::string expected;
    for (int r = 0; r < num_ranks; ++r) expected += message(r, number);
    REQUIRE(exchange(end, num_ranks, message(rank, number), kLong) == expected);
  }
}

template <typename Call>
void on_threads(int num_ranks, Call&& call) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.emplace_back([&, rank] { call(rank); });
  for (std::thread& rank : ranks) rank.join();
}

void threads() {
  for (int num_ranks : {1, 2, 3}) {
    auto ends = open_ends(num_ranks);
    on_threads(num_ranks, [&](int rank) { exchange_many(*ends[rank], num_ranks, rank, 100); });
  }
  // Messages of different lengths leave nothing behind that belongs to the next ones.
  auto ends = open_ends(2);
  for (std::size_t length : {0, 3, 2048, 5000}) {
    on_threads(2, [&](int rank) {
      REQUIRE(!exchange(*ends[rank], 2, std::string(length + rank, 'x'), kLong));
      exchange_many(*ends[rank], 2, rank, 3);
    });
  }
}

// One thread closes an end while another one waits in it: it waits for the other to come out.
void closing() {
  for (int turn = 0; turn < 5; ++turn) {
    auto ends = open_ends(2);
    on_threads(2, [&](int thread) {
      if (thread == 1) return ends[0]->close();
      exchange(*ends[0], 2, "x", kShort);
    });
    REQUIRE(!exchange(*ends[0], 2, "x", kShort));
    ends[0]->close();
    REQUIRE(ends[0]->lost().empty() && !ends[1]->lost().empty());
    REQUIRE(!exchange(*ends[1], 2, "x", kLong));
  }
}

}  // namespace

// Runs the case that the command line names.
int main(int, char** words) {
  const std::map<std::string, void (*)()> cases = {{"threads", threads}, {"closing", closing}};
  cases.at(words[1])();
  return 0;
}
