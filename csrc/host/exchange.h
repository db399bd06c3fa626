// Small messages between the processes of one node, through shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "common/error.h"

namespace ncclep {

// An all-gather of bytes, which takes a few microseconds if each rank has a core.
// Every rank has two slots. Message n of a rank is in its slot n % 2; the slot's sequence number is
// written last.  A rank writes message n + 2 only after it has read every rank's n + 1, and each
// rank wrote its n + 1 only after it had read every rank's n, so no message is overwritten while a
// rank still reads it.
//
//     sequence  rank 0's slots  rank 1's slots
//        1        -  1            -  1          both read 1
//        2        2  1            -  1          rank 0 waits for rank 1's 2; 1 may still be read
//        2        2  1            2  1          both read 2
//        3        2  3            2  1          1 is overwritten: rank 1 has reached 2
//
// Uses neither torch nor CUDA.  A mutex admits one thread at a time.
class HostExchange {
 public:
  // Bytes that one round moves; longer messages take several.
  static constexpr std::size_t kCapacity = 2048;
  // Far more than a node has; the bound keeps the segment small, since every rank has two slots.
  static constexpr int kMaxRanks = 4096;
  // How often a wait looks for dead peers and calls `poll`.
  static constexpr double kCheckInterval = 0.05;

  // Longer refusals are truncated to this many bytes.
  static constexpr std::size_t kReasonBytes = 512;
  // Bytes of a token.
  static constexpr std::size_t kTokenBytes = 16;

  // Maps `file`, which the caller still owns and may close afterwards.  Rank 0 must come first: it
  // sets the size of the file and writes `token` there, and the others throw unless they find it.
  // An unnamed file (memfd_create) disappears with the last process that maps it, however that
  // process ends.  Throws when a system call fails, or when the memory is not laid out for
  // `num_ranks` ranks.
  HostExchange(int file, const std::string& token, int num_ranks, int rank);
  ~HostExchange();
  HostExchange(const HostExchange&) = delete;
  HostExchange& operator=(const HostExchange&) = delete;

  // Writes every rank's `length` bytes, in the order of ranks, to `all`.  Collective.
  //
  // `what` names the call in errors.  `poll` is called now and then in a long wait and may throw.
  // Throws PeerError when a rank has died, has closed its end, or does not come within `timeout_s`
  // seconds; it names these ranks, and all later calls of this rank throw at once.  Also throws
  // PeerError, but the object stays usable: on every waiting rank when some rank has skipped this
  // exchange or refused the call, and on all ranks when the lengths differ.
  void exchange(const char* mine, std::size_t length, char* all, const std::string& what,
                double timeout_s, const std::function<void()>& poll);

  // Publishes that this rank has reached call number `call`, and with `skips_exchange` that it
  // exchanges nothing in it, for ranks that wait in an exchange of this call or an earlier one.
  // Numbers increase.  Like the functions below, not collective and never waits.
  //
  // An exchange in this call does not wait for ranks that have refused call `since` or a later one.
  void enter(std::uint64_t call, bool skips_exchange, std::uint64_t since);
  // Publishes why this rank refused the call that it entered, in which it exchanges nothing; empty:
  // clears the reason.
  void refuse(const std::string& reason);
  // The last reason that `rank` published, if it refused call `since` or a later one.
  std::string refusal(int rank, std::uint64_t since);
  // The first rank that has skipped this call's exchange or is in a later call; -1: none, or all
  // ranks have exchanged in this call, so a rank in a later one left no rank waiting here.
  int gone_on();

  // Lists the ranks that have died, closed their end or given up and so will not come to the next
  // exchange; empty when there is none, and after `close`.  Not collective, and does not wait.
  std::string lost();

  // Unmaps the memory and tells the other ranks.  Not collective.
  void close();

  int num_ranks() const { return num_ranks_; }

 private:
  struct Slot;
  struct Rank;
  struct Segment;

  void map(int file);
  void join(const std::string& token);
  void round(const char* mine, std::size_t length, std::size_t total, const std::string& what,
             double timeout_s, const std::function<void()>& poll);
  bool has_come(int rank) const;
  std::string why_gone(int rank) const;
  std::string why_never(int rank) const;
  void raise_if_lost(bool is_late, const std::string& what, double timeout_s) const;
  void require_equal_lengths(std::size_t length, const std::string& what) const;
  Slot& slot(int rank) const;
  std::string reason_of(int rank, std::uint64_t since) const;
  bool has_gone_on(int rank) const;
  bool is_void() const;

  const int num_ranks_;
  const int rank_;
  std::mutex mutex_;
  Segment* segment_ = nullptr;
  std::size_t num_bytes_ = 0;
  std::int64_t process_ = 0;    // that joined; a forked child's copy of the object marks nothing
  std::uint64_t sequence_ = 0;  // of the last message that this rank wrote
  std::uint64_t since_ = 0;     // see `enter`
  bool has_given_up_ = false;
  bool has_met_ = false;  // all ranks have exchanged something in this call
};

}  // namespace ncclep
