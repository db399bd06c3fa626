#include "host/exchange.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/pause.h"

namespace ncclep {

namespace {

constexpr std::size_t kCacheLine = 64;
// Says that the memory is laid out as below; change it with the layout.
constexpr std::uint64_t kLayout = 0x6e63636c65700003;

// A wait polls this many times (a few microseconds) before it pauses; see `pause_in_wait`.
constexpr int kSpins = 100;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The PID namespace: process ids are comparable only within one; 0: unknown.
std::uint64_t process_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// A dead process remains, in state Z, until its parent collects its status.
bool has_died(pid_t process) {
  if (kill(process, 0) != 0) return errno == ESRCH;
  char start[512];  // holds the whole name: the system keeps at most 64 bytes of it
  const int file = open(("/proc/" + std::to_string(process) + "/stat").c_str(), O_RDONLY);
  if (file < 0) return errno == ENOENT;
  const ssize_t length = read(file, start, sizeof(start));
  ::close(file);
  const std::string text(start, std::max<ssize_t>(length, 0));
  const std::size_t name_end = text.rfind(')');  // a program's name may contain anything
  return name_end != std::string::npos && text.compare(name_end, 3, ") Z") == 0;
}

constexpr char kGaveUp[] = "gave up waiting for other ranks";

// Appends a rank and its reason to a list, unless the reason is empty.
void add_name(std::string& names, int rank, const std::string& reason) {
  if (reason.empty()) return;
  names += join_text(names.empty() ? "" : "; ", "rank ", rank, " ", reason);
}

// Throws the error of a failed system call.
[[noreturn]] void fail_in(const char* call, int error) {
  fail("shared memory: ", call, " failed: ", std::strerror(error));
}

}  // namespace

struct alignas(kCacheLine) HostExchange::Slot {
  std::atomic<std::uint64_t> sequence;  // of the message; 0: none yet
  std::uint64_t call;                   // in which it was written
  std::uint64_t length;                 // of the whole message; `bytes` is one part of it
  char bytes[kCapacity];
};

struct alignas(kCacheLine) HostExchange::Rank {
  std::int64_t process;
  std::uint64_t process_namespace;
  std::atomic<std::uint64_t> gave_up_at;  // the sequence number; 0: it has not
  std::atomic<std::uint64_t> is_closed;
  std::atomic<std::uint64_t> call;  // the call it has reached, times 2; + 1: it skips the exchange
  std::atomic<std::uint64_t> refused;        // the call that it has refused
  std::atomic<std::uint64_t> reason_length;  // of what follows; 0: it has refused nothing
  char reason[kReasonBytes];
  Slot slots[2];
};

struct alignas(kCacheLine) HostExchange::Segment {
  std::uint64_t layout;
  std::int64_t num_ranks;
  char token[kTokenBytes];
  alignas(kCacheLine) Rank ranks[];
};

// Only lock-free atomics work across processes.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

HostExchange::HostExchange(int file, const std::string& token, int num_ranks, int rank)
    : num_ranks_(num_ranks), rank_(rank) {
  require(0 <= rank && rank < num_ranks && num_ranks <= kMaxRanks, "rank ", rank, " of ", num_ranks,
          ": at most ", kMaxRanks, " ranks of one node");
  require(token.size() == kTokenBytes, "a token has ", kTokenBytes, " bytes, not ", token.size());
  num_bytes_ = sizeof(Segment) + num_ranks * sizeof(Rank);
  try {
    map(file);
    join(token);
  } catch (...) {
    if (segment_ != nullptr) munmap(segment_, num_bytes_);
    throw;
  }
}

HostExchange::~HostExchange() { close(); }

void HostExchange::map(int file) {
  if (rank_ == 0) {
    // Takes the memory now: a lack of it would otherwise be a SIGBUS at the first write.
    const int error = posix_fallocate(file, 0, static_cast<off_t>(num_bytes_));
    if (error != 0) fail_in("posix_fallocate", error);
  }
  struct stat status;
  if (fstat(file, &status) != 0) fail_in("fstat", errno);
  require(status.st_size == static_cast<off_t>(num_bytes_), "the shared memory has ",
          status.st_size, " bytes, not the ", num_bytes_, " of ", num_ranks_, " ranks");
  void* address = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (address == MAP_FAILED) fail_in("mmap", errno);
  segment_ = static_cast<Segment*>(address);
}

void HostExchange::join(const std::string& token) {
  if (rank_ == 0) {  // everything else starts as zero
    segment_->layout = kLayout;
    segment_->num_ranks = num_ranks_;
    std::memcpy(segment_->token, token.data(), kTokenBytes);
  }
  require(segment_->layout == kLayout && segment_->num_ranks == num_ranks_,
          "the shared memory is not laid out for ", num_ranks_, " ranks by this version");
  require(std::memcmp(segment_->token, token.data(), kTokenBytes) == 0,
          "the shared memory is not that of this group");
  process_ = getpid();
  segment_->ranks[rank_].process = process_;
  segment_->ranks[rank_].process_namespace = process_namespace();
}

void HostExchange::close() {
  const std::lock_guard<std::mutex> alone(mutex_);
  if (segment_ == nullptr) return;
  if (process_ == getpid()) segment_->ranks[rank_].is_closed = 1;
  munmap(std::exchange(segment_, nullptr), num_bytes_);
}

HostExchange::Slot& HostExchange::slot(int rank) const {
  return segment_->ranks[rank].slots[sequence_ % 2];
}

bool HostExchange::has_come(int rank) const {
  const Slot& theirs = slot(rank);
  return theirs.sequence.load(std::memory_order_acquire) == sequence_ &&
         theirs.call == slot(rank_).call;
}

void HostExchange::exchange(const char* mine, std::size_t length, char* all,
                            const std::string& what, double timeout_s,
                            const std::function<void()>& poll) {
  const std::lock_guard<std::mutex> alone(mutex_);
  require(segment_ != nullptr, "the exchange was closed");
  if (has_given_up_) {
    throw PeerError(join_text("rank ", rank_, " of ", num_ranks_, ": ", what,
                              " cannot be agreed on: this rank gave up waiting for the other ranks "
                              "of the expert-parallel group in an earlier call"));
  }
  std::size_t done = 0;
  do {
    const std::size_t part = std::min(length - done, kCapacity);
    round(mine + done, part, length, what, timeout_s, poll);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      std::memcpy(all + rank * length + done, slot(rank).bytes, part);
    }
    done += part;
  } while (done < length);
  has_met_ = true;
}

// Writes this rank's next message and waits for those of all ranks.
void HostExchange::round(const char* mine, std::size_t length, std::size_t total,
                         const std::string& what, double timeout_s,
                         const std::function<void()>& poll) {
  ++sequence_;
  Slot& own = slot(rank_);
  std::memcpy(own.bytes, mine, length);
  own.length = total;
  own.call = segment_->ranks[rank_].call / 2;
  own.sequence.store(sequence_, std::memory_order_release);
  try {
    int num_here = 0;
    const auto all_here = [&] {
      while (num_here < num_ranks_ && has_come(num_here)) ++num_here;
      return num_here == num_ranks_;
    };
    for (int i = 0; i < kSpins && !all_here(); ++i) pause_cpu();
    const Clock::time_point start = Clock::now();
    double next_check = kCheckInterval;
    while (!all_here()) {
      const double waited = seconds_since(start);
      const bool is_late = waited > timeout_s;
      if (is_late || waited > next_check) {
        next_check = waited + kCheckInterval;
        raise_if_lost(is_late, what, timeout_s);
        poll();
      }
      pause_in_wait(waited);
    }
    // A rank may come so late that another one has given up: then the call fails on all ranks.
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const std::uint64_t end = segment_->ranks[rank].gave_up_at.load(std::memory_order_acquire);
      if (end != 0 && end <= sequence_) raise_if_lost(true, what, timeout_s);
    }
  } catch (...) {
    // The other ranks must not take this rank's message as a sign that it completed the call.
    if (is_void()) {
      own.sequence.store(sequence_ < 2 ? 0 : sequence_ - 2, std::memory_order_release);
      --sequence_;
    } else {
      has_given_up_ = true;
      segment_->ranks[rank_].gave_up_at.store(sequence_, std::memory_order_release);
    }
    throw;
  }
  require_equal_lengths(total, what);
}

void HostExchange::enter(std::uint64_t call, bool skips_exchange, std::uint64_t since) {
  const std::lock_guard<std::mutex> alone(mutex_);
  if (segment_ == nullptr) return;
  since_ = since;
  has_met_ = false;
  segment_->ranks[rank_].call.store(2 * call + skips_exchange, std::memory_order_release);
}

void HostExchange::refuse(const std::string& reason) {
  const std::lock_guard<std::mutex> alone(mutex_);
  if (segment_ == nullptr) return;
  Rank& own = segment_->ranks[rank_];
  const std::size_t length = std::min(reason.size(), kReasonBytes);
  own.reason_length.store(0, std::memory_order_release);
  std::memcpy(own.reason, reason.data(), length);
  own.refused = own.call / 2;
  own.reason_length.store(length, std::memory_order_release);
}

std::string HostExchange::refusal(int rank, std::uint64_t since) {
  const std::lock_guard<std::mutex> alone(mutex_);
  require(0 <= rank && rank < num_ranks_, "rank ", rank, " of ", num_ranks_);
  return segment_ == nullptr ? "" : reason_of(rank, since);
}

std::string HostExchange::reason_of(int rank, std::uint64_t since) const {
  const Rank& peer = segment_->ranks[rank];
  const std::size_t length = peer.reason_length.load(std::memory_order_acquire);
  if (peer.refused < since) return "";
  return {peer.reason, std::min(length, kReasonBytes)};
}

int HostExchange::gone_on() {
  const std::lock_guard<std::mutex> alone(mutex_);
  for (int rank = 0; segment_ != nullptr && !has_met_ && rank < num_ranks_; ++rank) {
    if (has_gone_on(rank)) return rank;
  }
  return -1;
}

// Whether this call's exchange is void: all ranks are alive, and some rank skipped or refused it,
// so they may still meet in a later call.
bool HostExchange::is_void() const {
  bool is_void = false;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (segment_->ranks[rank].gave_up_at != 0 || !why_gone(rank).empty()) return false;
    is_void = is_void || has_gone_on(rank) || !reason_of(rank, since_).empty();
  }
  return is_void;
}

bool HostExchange::has_gone_on(int rank) const {
  return segment_->ranks[rank].call.load(std::memory_order_acquire) >
         segment_->ranks[rank_].call.load();
}

// Why `rank` will never write again; empty if it still may.
std::string HostExchange::why_gone(int rank) const {
  const Rank& peer = segment_->ranks[rank];
  if (peer.is_closed != 0) return "has closed its end";
  if (peer.process_namespace != 0 &&
      peer.process_namespace == segment_->ranks[rank_].process_namespace &&
      has_died(static_cast<pid_t>(peer.process))) {
    return join_text("(process ", peer.process, ") has died");
  }
  return "";
}

// Why `rank` will not come to the current round; empty if it still may.
std::string HostExchange::why_never(int rank) const {
  const std::uint64_t end = segment_->ranks[rank].gave_up_at.load(std::memory_order_acquire);
  if (end != 0 && end <= sequence_) return kGaveUp;
  std::string reason = why_gone(rank);
  if (reason.empty()) {
    const std::string refusal = reason_of(rank, since_);
    if (!refusal.empty()) {
      reason = "refused a call (" + refusal + ")";
    } else if (has_gone_on(rank)) {
      reason = join_text("has gone on to call ", segment_->ranks[rank].call / 2,
                         " without an exchange in call ", segment_->ranks[rank_].call / 2,
                         ", in which this rank is waiting");
    }
  }
  // It may have written its message just before.
  return reason.empty() || has_come(rank) ? "" : reason;
}

// Throws if any rank will never come or, with `is_late`, if any has not come yet.
void HostExchange::raise_if_lost(bool is_late, const std::string& what, double timeout_s) const {
  std::string names;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    std::string reason = why_never(rank);
    if (reason.empty() && is_late && !has_come(rank)) reason = "did not come";
    add_name(names, rank, reason);
  }
  if (names.empty()) return;
  throw PeerError(join_text("rank ", rank_, " of ", num_ranks_,
                            ": no answer from the other ranks of the expert-parallel group in ",
                            what, " (deadline ", timeout_s, " s): ", names,
                            "; look at the other ranks' output"));
}

std::string HostExchange::lost() {
  const std::lock_guard<std::mutex> alone(mutex_);
  std::string names;
  for (int rank = 0; segment_ != nullptr && rank < num_ranks_; ++rank) {
    const bool gave_up = segment_->ranks[rank].gave_up_at.load(std::memory_order_acquire) != 0;
    if (rank != rank_) add_name(names, rank, gave_up ? kGaveUp : why_gone(rank));
  }
  return names;
}

void HostExchange::require_equal_lengths(std::size_t length, const std::string& what) const {
  bool is_equal = true;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    is_equal = is_equal && slot(rank).length == length;
  }
  if (is_equal) return;
  std::string names;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    names += join_text(rank == 0 ? "" : ", ", "rank ", rank, " sent ", slot(rank).length, " bytes");
  }
  throw PeerError(join_text(
      "rank ", rank_, " of ", num_ranks_, ": the ranks of the expert-parallel group are in ",
      "different calls: ", names, " while this rank is in ", what,
      ". Every rank must run the same layers in the same order, backward included"));
}

}  // namespace ncclep
