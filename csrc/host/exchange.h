// Small messages between the hosts' processes of one node, through shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "common/error.h"

namespace ncclep {

// An all-gather of bytes, in a few microseconds where the ranks have a core each.
//
// Every rank has two slots.  Message n of a rank lies in its slot n % 2; the slot's sequence number
// is written last.  A rank writes message n + 2 after it has read everybody's n + 1, and they wrote
// n + 1 after they had read everybody's n: so nobody overwrites what somebody still reads.
//
//     sequence  rank 0's slots  rank 1's slots
//        1        -  1            -  1          both read 1
//        2        2  1            -  1          rank 0 waits for rank 1's 2; 1 may still be read
//        2        2  1            2  1          both read 2
//        3        2  3            2  1          1 is overwritten: rank 1 has come to 2
//
// Torch-free and without CUDA.  One thread at a time is inside; others wait for it.
class HostExchange {
 public:
  // Bytes that one round moves; longer messages take several.
  static constexpr std::size_t kCapacity = 2048;
  // Far more than a node has: two messages of each take memory.
  static constexpr int kMaxRanks = 4096;
  // How often a wait looks for dead peers and calls `poll`.
  static constexpr double kCheckInterval = 0.05;

  // Bytes that are kept of a refusal.
  static constexpr std::size_t kReasonBytes = 512;
  // Bytes of a token.
  static constexpr std::size_t kTokenBytes = 16;

  // Maps `file`, which stays the caller's and may be closed after that.  Rank 0 comes first: it
  // gives the file its size and writes `token` there, and the others throw unless they find it.  A
  // file without a name (memfd_create) is gone with the last process that maps it, however that
  // ends. Throws when the system refuses, or when the memory is not for `num_ranks` ranks.
  HostExchange(int file, const std::string& token, int num_ranks, int rank);
  ~HostExchange();
  HostExchange(const HostExchange&) = delete;
  HostExchange& operator=(const HostExchange&) = delete;

  // Writes every rank's `length` bytes, in the order of ranks, to `all`.  Collective.
  //
  // `what` names the call in errors.  `poll` is called now and then in a long wait and may throw.
  // Throws PeerError when a rank has died, has closed its end, or does not come within `timeout_s`
  // seconds; it names these ranks, and all later calls of this rank throw at once.  Throws
  // PeerError and goes on working when a rank has gone on without an exchange or has refused the
  // call, on all that wait for it, and when the lengths differ, on all ranks.
  void exchange(const char* mine, std::size_t length, char* all, const std::string& what,
                double timeout_s, const std::function<void()>& poll);

  // Writes down that this rank has come to call number `call`, and whether it exchanges nothing in
  // it, for those that wait in an exchange of this call or an earlier one.  Numbers grow.  Not
  // collective, and does not wait, as the next ones.
  //
  // In an exchange of this call, ranks are not expected that have refused call `since` or a later
  // one.
  void enter(std::uint64_t call, bool goes_on, std::uint64_t since);
  // Writes down why this rank has refused the call that it entered, and exchanges nothing in it;
  // empty: there is nothing to say any more.
  void refuse(const std::string& reason);
  // What `rank` wrote down last, if it was in call `since` or later.
  std::string refusal(int rank, std::uint64_t since);
  // The first rank that has gone on where this one stands; -1: none, or all have exchanged in this
  // call, and whoever is in a later one left none of them waiting.
  int gone_on();

  // Says which ranks have died, have closed their end or gave up, and will not come to the next
  // exchange; empty when none has, and after `close`.  Not collective, and does not wait.
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
  std::int64_t process_ = 0;    // this one; a forked child's copy of the object tells nobody
  std::uint64_t sequence_ = 0;  // of the last message that this rank wrote
  std::uint64_t since_ = 0;     // see `enter`
  bool has_given_up_ = false;
  bool has_met_ = false;  // all ranks have exchanged something in this call
};

}  // namespace ncclep
