// What a group's kernels share: where things lie in the control window, and the state of one rank.
//
// Letters: R ranks, E experts of the whole group, T tokens of a rank, K picks of a token.  A *pair* is
// a (source rank, token) that has picks on a rank; a *pick* is one (token, expert).
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
// Tokens are flagged and counted in chunks of this many.
constexpr int kChunk = 128;

enum class Phase : std::uint32_t { kNone, kPlan, kRoutes, kDispatch, kCombine };

// What one rank tells another is one word, written by that rank alone.
enum Signal : int { kRoutesWritten, kEntered, kNumSignals };

// The control window of each rank; `[r]` is written by rank r into this rank's window.
struct Control {
  int num_ranks, num_experts, max_tokens, max_top_k;

  NCCLEP_BOTH int max_chunks() const { return (max_tokens + kChunk - 1) / kChunk; }
  // Counted for every destination: picks for each expert, then pairs on each rank.
  NCCLEP_BOTH int num_columns() const { return num_experts + num_ranks; }
  NCCLEP_BOTH std::size_t picks() const {
    return static_cast<std::size_t>(max_tokens) * max_top_k;
  }

  // uint64 [kNumSignals][R]: epochs.
  NCCLEP_BOTH std::size_t signals() const { return 0; }
  // uint64 [R][columns]: epoch in the upper half, count in the lower.
  NCCLEP_BOTH std::size_t counts() const { return signals() + kNumSignals * num_ranks * 8; }
  // uint64 [R][chunks]: epoch of the dispatch whose rows of rank r's chunk are in r's window.
  NCCLEP_BOTH std::size_t staged() const {
    return counts() + static_cast<std::size_t>(num_ranks) * num_columns() * 8;
  }
  // uint64 [R][chunks]: epoch of the combine whose sums for my chunk rank r has pushed.
  NCCLEP_BOTH std::size_t pushed() const {
    return staged() + static_cast<std::size_t>(num_ranks) * max_chunks() * 8;
  }
  // float [2][T * K]: my picks' weights, for others to fetch; two, for two dispatches in a row.
  NCCLEP_BOTH std::size_t weights() const {
    return pushed() + static_cast<std::size_t>(num_ranks) * max_chunks() * 8;
  }
  // float [T * K]: what combine brings back to my picks.
  NCCLEP_BOTH std::size_t values() const { return weights() + 2 * picks() * 4; }
  // int32 [R][T]: token of each pair that rank r has here, and its first pick.
  NCCLEP_BOTH std::size_t pair_token() const { return values() + picks() * 4; }
  NCCLEP_BOTH std::size_t pair_first() const {
    return pair_token() + static_cast<std::size_t>(num_ranks) * max_tokens * 4;
  }
  // int32 [R][T * K]: slot of each pick that rank r has here, and its place token * K + k at home.
  NCCLEP_BOTH std::size_t pick_slot() const {
    return pair_first() + static_cast<std::size_t>(num_ranks) * max_tokens * 4;
  }
  NCCLEP_BOTH std::size_t pick_home() const { return pick_slot() + num_ranks * picks() * 4; }
  NCCLEP_BOTH std::size_t num_bytes() const { return pick_home() + num_ranks * picks() * 4; }
};

// In mapped host memory: written by the device, polled by the host.
struct Mailbox {
  // Of the plan whose epoch stands in plan_epoch, which is written last.
  std::int64_t num_rows, num_pairs, num_picks, num_dropped;
  volatile std::uint64_t plan_epoch;
  // A pick that is no expert, or one named twice; `what` is written last.
  std::int64_t bad_token, bad_pick, bad_expert;
  volatile std::uint32_t bad_what;
  // A wait whose deadline passed: who waited for whom, in what; `failed_phase` is written last.
  std::int32_t failed_peer;
  std::uint64_t failed_epoch;
  volatile std::uint32_t failed_phase;
};

enum BadPick : std::uint32_t { kPickGood, kPickOutside, kPickTwice, kPickTooMany };

// In device memory of one rank; zero at the start.
struct State {
  std::uint64_t epoch;         // operations that are over
  unsigned long long arrived;  // at grid barriers, over all operations
  unsigned int leaving;        // CTAs of the current operation that are done
  unsigned int failed;         // a deadline has passed: nobody waits any longer
};

// What every kernel of a group gets.
struct Rank {
  Control control;
  int rank;
  char* control_of[kMaxRanks];  // control windows, by rank
  State* state;
  Mailbox* mailbox;
  std::uint64_t deadline_ns;
};

}  // namespace ncclep::native
