// HostExchange between threads and between processes, for sanitizers to watch.
//
// ThreadSanitizer sees addresses, and every end maps the memory at another one.  So with
// NCCLEP_ONE_MAPPING the ends of a process get one mapping (see test_sanitizers.py), and what one
// writes and another reads without order is a race that it reports.
#include "host/exchange.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cases.h"

#ifdef NCCLEP_ONE_MAPPING
#undef mmap
#undef munmap
extern "C" void* mmap(void*, std::size_t, int, int, int, off_t) noexcept;
extern "C" int munmap(void*, std::size_t) noexcept;

namespace {

struct Mapping {
  void* address;
  int users;
};
std::mutex mappings_mutex;
std::map<ino_t, Mapping> mappings;

}  // namespace

extern "C" void* mmap_once(void*, std::size_t length, int protection, int flags, int file,
                           off_t) noexcept {
  const std::lock_guard<std::mutex> alone(mappings_mutex);
  struct stat status;
  if (fstat(file, &status) != 0) return MAP_FAILED;
  Mapping& mapping = mappings[status.st_ino];
  if (mapping.users++ == 0) mapping.address = mmap(nullptr, length, protection, flags, file, 0);
  return mapping.address;
}

extern "C" int munmap_once(void* address, std::size_t length) noexcept {
  const std::lock_guard<std::mutex> alone(mappings_mutex);
  for (auto one = mappings.begin(); one != mappings.end(); ++one) {
    if (one->second.address != address) continue;
    if (--one->second.users > 0) return 0;
    mappings.erase(one);
    return munmap(address, length);
  }
  return -1;
}
#endif

namespace {

using ncclep::HostExchange;
using ncclep::PeerError;

constexpr double kLong = 60, kShort = 0.1;

void no_poll() {}

const std::string kToken(HostExchange::kTokenBytes, 't');

// Memory without a name.
class File {
 public:
  File() : number_(memfd_create("ncclep-sanitized", MFD_CLOEXEC)) { REQUIRE(number_ >= 0); }
  ~File() { close(number_); }
  File(const File&) = delete;
  operator int() const { return number_; }

 private:
  int number_;
};

std::vector<std::unique_ptr<HostExchange>> open_ends(int num_ranks) {
  const File file;
  std::vector<std::unique_ptr<HostExchange>> ends;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ends.push_back(std::make_unique<HostExchange>(file, kToken, num_ranks, rank));
  }
  return ends;
}

// Of all ranks in the same call; every byte depends on the rank.
std::string message(int rank, int number) {
  std::mt19937 draw(number);
  // Around what one round moves, and what two do, and nothing.
  const std::size_t lengths[] = {0, 1, draw() % 90, 2047, 2048, 2049, 4096, draw() % 9000};
  std::string text(lengths[draw() % 8], '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(rank + number + i);
  return text;
}

void exchange_many(HostExchange& end, int num_ranks, int rank, int count) {
  std::mt19937 draw(rank);
  for (int number = 0; number < count; ++number) {
    if (draw() % 8 == 0) usleep(draw() % 300);
    const std::string mine = message(rank, number);
    const std::unique_ptr<char[]> all(new char[num_ranks * mine.size()]);  // of its very size
    end.exchange(mine.data(), mine.size(), all.get(), "a call", kLong, no_poll);
    for (int r = 0; r < num_ranks; ++r) {
      const std::string theirs = message(r, number);
      REQUIRE(std::string(all.get() + r * mine.size(), mine.size()) == theirs);
    }
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
}

// All bytes that a rank leaves behind belong to the next message, whatever its length.
void different_lengths() {
  auto ends = open_ends(2);
  for (std::size_t length : {0, 3, 2048, 5000}) {
    on_threads(2, [&](int rank) {
      const std::string mine(length + rank, 'x');
      const std::unique_ptr<char[]> all(new char[2 * mine.size()]);
      REQUIRE(refuses(
          [&] {
            ends[rank]->exchange(mine.data(), mine.size(), all.get(), "a call", kLong, no_poll);
          },
          "in different calls"));
    });
    on_threads(2, [&](int rank) { exchange_many(*ends[rank], 2, rank, 3); });
  }
}

// One thread closes an end while another one waits in it: it waits for the other to come out.
void closing() {
  for (int turn = 0; turn < 5; ++turn) {
    auto ends = open_ends(2);
    char mine = 'x', all[2];
    std::thread waiting(
        [&] { error_of([&] { ends[0]->exchange(&mine, 1, all, "a call", kShort, no_poll); }); });
    std::thread closes([&] { ends[0]->close(); });
    waiting.join();
    closes.join();
    REQUIRE(
        refuses([&] { ends[0]->exchange(&mine, 1, all, "a call", kShort, no_poll); }, "closed"));
    ends[0]->close();
    REQUIRE(ends[0]->lost().empty() && !ends[1]->lost().empty());
    REQUIRE(refuses([&] { ends[1]->exchange(&mine, 1, all, "a call", kLong, no_poll); }, "rank 0"));
  }
}

// A poll that throws, as Ctrl-C does, ends the wait; this rank does not come back, and is said to.
void interrupted() {
  auto ends = open_ends(2);
  char mine = 'x', all[2];
  const auto interrupt = [] { ncclep::fail("Ctrl-C"); };
  REQUIRE(refuses([&] { ends[0]->exchange(&mine, 1, all, "a call", kLong, interrupt); }, "Ctrl-C"));
  REQUIRE(refuses([&] { ends[0]->exchange(&mine, 1, all, "a call", kLong, no_poll); },
                  "gave up waiting"));
  REQUIRE(refuses([&] { ends[1]->exchange(&mine, 1, all, "a call", kLong, no_poll); },
                  "rank 0 gave up"));
}

void refused() {
  const File file, other;
  REQUIRE(refuses([&] { HostExchange(file, kToken, 2, 2); }, "rank 2 of 2"));
  REQUIRE(refuses([&] { HostExchange(file, kToken, 0, 0); }, "rank 0 of 0"));
  REQUIRE(refuses([&] { HostExchange(file, kToken, -1, -3); }, "rank -3 of -1"));
  REQUIRE(refuses([&] { HostExchange(file, kToken, INT32_MAX, 0); }, "at most 4096 ranks"));
  for (const char* token : {"", "x", "0123456789abcdefg"}) {
    REQUIRE(refuses([&] { HostExchange(file, token, 2, 0); }, "a token has 16 bytes"));
  }
  REQUIRE(refuses([&] { HostExchange(-1, kToken, 2, 0); }, "failed"));
  REQUIRE(refuses([&] { HostExchange(-1, kToken, 2, 1); }, "fstat failed"));
  REQUIRE(refuses([&] { HostExchange(1 << 20, kToken, 2, 0); }, "failed"));
  REQUIRE(refuses([&] { HostExchange(file, kToken, 2, 1); }, "has 0 bytes"));  // rank 0 comes first
  HostExchange first(file, kToken, 2, 0);
  REQUIRE(refuses([&] { HostExchange(file, kToken, 3, 1); }, "bytes, not the"));
  REQUIRE(refuses([&] { HostExchange(file, std::string(16, 'x'), 2, 1); }, "not that of this"));
  // As long, and with other things in it.
  HostExchange(other, kToken, 2, 0);
  REQUIRE(pwrite(other, "version 7", 9, 0) == 9);
  REQUIRE(refuses([&] { HostExchange(other, kToken, 2, 1); }, "not laid out"));
}

// Waits for a child; its exit status, or minus the signal.
int status_of(pid_t child) {
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void processes() {
  constexpr int kRanks = 3;
  const File file;
  HostExchange first(file, kToken, kRanks, 0);
  std::vector<pid_t> children;
  for (int rank = 1; rank < kRanks; ++rank) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      HostExchange end(file, kToken, kRanks, rank);
      exchange_many(end, kRanks, rank, 100);
      end.close();
      first.close();  // the copy of rank 0's end that the fork made tells nobody
      _exit(0);
    }
    children.push_back(child);
  }
  exchange_many(first, kRanks, 0, 100);
  for (pid_t child : children) REQUIRE(status_of(child) == 0);
}

void a_process_dies() {
  const File file;
  HostExchange first(file, kToken, 2, 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    HostExchange end(file, kToken, 2, 1);
    exchange_many(end, 2, 1, 20);
    _exit(7);
  }
  exchange_many(first, 2, 0, 20);
  char mine = 'x', all[2];
  REQUIRE(refuses([&] { first.exchange(&mine, 1, all, "a call", kLong, no_poll); }, "has died"));
  REQUIRE(first.lost().find("rank 1") != std::string::npos);
  REQUIRE(status_of(child) == 7);
}

}  // namespace

int main(int count, char** words) {
  return run_case(count, words,
                  {{"threads", threads},
                   {"different_lengths", different_lengths},
                   {"closing", closing},
                   {"interrupted", interrupted},
                   {"refused", refused},
                   {"processes", processes},
                   {"a_process_dies", a_process_dies}});
}
