// What a group's kernels share: where things lie in the control window, and the state of one rank.
//
// Letters: R ranks, E experts of the whole group, T tokens of a rank, K picks of a token.  A *pair*
// is a (source rank, token) that has picks on a rank; a *pick* is one (token, expert).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ncclep::native {

#ifdef __CUDACC__
#define NCCLEP_BOTH __host__ __device__
#else
#define NCCLEP_BOTH
#endif

constexpr int kMaxRanks = 32;
constexpr int kMaxTopK = 32;
constexpr int kMaxExperts = 512;
// Tokens are counted, and their sums flagged, in chunks of this many.
constexpr int kChunk = 128;
// Rows of x are staged, and flagged, in this many phases.
constexpr int kPhases = 5;

enum class Phase : std::uint32_t { kNone, kPlan, kRoutes, kDispatch, kCombine };

// What one rank tells another is one word, written by that rank alone.
enum Signal : int { kRoutesWritten, kEntered, kNumSignals };

// The control window of each rank.  `[r]` is written by rank r, or, where it says so, for rank r.
struct Control {
  int num_ranks, num_experts, max_tokens, max_top_k;

  NCCLEP_BOTH int max_chunks() const { return (max_tokens + kChunk - 1) / kChunk; }
  // Counted for every destination: picks for each expert, then pairs on each rank.
  NCCLEP_BOTH int num_columns() const { return num_experts + num_ranks; }
  NCCLEP_BOTH std::size_t picks() const { return static_cast<std::size_t>(max_tokens) * max_top_k; }

  // uint64 [kNumSignals][R]: epochs.
  NCCLEP_BOTH std::size_t signals() const { return 0; }
  // uint64 [2][R][columns]: epoch in the upper half, count in the lower.  Two, because a rank may
  // post its next counts while another still reads the last.
  NCCLEP_BOTH std::size_t counts() const { return signals() + kNumSignals * num_ranks * 8; }
  // uint64 [R][kPhases]: epoch of the dispatch whose rows of this phase are in rank r's window.
  NCCLEP_BOTH std::size_t staged() const {
    return counts() + static_cast<std::size_t>(2) * num_ranks * num_columns() * 8;
  }
  // uint64 [R][chunks]: epoch of the combine whose sums for my chunk rank r has pushed.
  NCCLEP_BOTH std::size_t pushed() const { return staged() + num_ranks * kPhases * 8; }
  // uint32 [R][chunks], for this rank alone: pairs of rank r's chunk whose sums it has pushed.
  NCCLEP_BOTH std::size_t num_pushed() const {
    return pushed() + static_cast<std::size_t>(num_ranks) * max_chunks() * 8;
  }
  // float [2][R][T * K]: weights of rank r's picks; two, for two dispatches in a row.
  NCCLEP_BOTH std::size_t weights() const {
    return num_pushed() + static_cast<std::size_t>(num_ranks) * max_chunks() * 8;
  }
  // float [T * K]: what combine brings back to my picks.
  NCCLEP_BOTH std::size_t values() const { return weights() + 2 * num_ranks * picks() * 4; }
  // int32 [R][T], for rank r to fetch: token of each of my pairs there, and its first pick.
  NCCLEP_BOTH std::size_t pair_token() const { return values() + picks() * 4; }
  NCCLEP_BOTH std::size_t pair_first() const {
    return pair_token() + static_cast<std::size_t>(num_ranks) * max_tokens * 4;
  }
  // int32 [R][T * K], for rank r to fetch: slot there of each of my picks, and token * K + k.
  NCCLEP_BOTH std::size_t pick_slot() const {
    return pair_first() + static_cast<std::size_t>(num_ranks) * max_tokens * 4;
  }
  NCCLEP_BOTH std::size_t pick_home() const { return pick_slot() + num_ranks * picks() * 4; }
  NCCLEP_BOTH std::size_t num_bytes() const { return pick_home() + num_ranks * picks() * 4; }
};

// In mapped host memory: written by the device, polled by the host.
struct Mailbox {
  // Of the plan whose number stands in `plans`, which is written last.
  std::int64_t num_rows, num_pairs, num_picks, num_dropped;
  std::uint32_t bad_ranks;  // whose routing names what is no expert, or one twice; one bit each
  volatile std::uint64_t plans;
  // A wait whose deadline passed: who waited for whom, in what; `failed_phase` is written last.
  std::int32_t failed_peer;
  std::uint64_t failed_epoch;
  volatile std::uint32_t failed_phase;
};

// In device memory of one rank; zero at the start.
struct State {
  std::uint64_t epoch;  // operations that are over
  std::uint64_t plans;  // plans that are over
  std::uint64_t dispatches;
  std::uint64_t last_dispatch;   // its epoch
  unsigned int arrived;          // at grid barriers of the current operation, one after the other
  unsigned int leaving;          // CTAs of the current operation that are done
  unsigned int failed;           // a deadline has passed: nobody waits any longer
  unsigned int is_bad;           // this rank's routing, in the current plan
  unsigned int staged[kPhases];  // CTAs that have staged their share of a phase of this dispatch
};

// What every kernel of a group gets.
struct Rank {
  Control control;
  int rank;
  char* control_of[kMaxRanks];  // control windows, by rank
  char* rows_of[kMaxRanks];     // row windows, by rank: two for dispatch, then the one for combine
  std::size_t dispatch_bytes;   // of one of the two
  State* state;
  Mailbox* mailbox;
  std::uint64_t deadline_ns;
};

}  // namespace ncclep::native
