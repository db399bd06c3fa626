// Shared by all kernels of a group: the layout of the control window and the state of one rank.
//
// Letters: R ranks, E experts of the whole group, T tokens of a rank, K assignments of a token.  A
// *pair* is a (source rank, token) that has assignments on a rank; an *assignment* is one (token,
// expert).
#pragma once

#include <cstddef>
#include <cstdint>

#include "include/ncclep.h"

namespace ncclep::native {

#ifdef __CUDACC__
#define NCCLEP_BOTH __host__ __device__
#else
#define NCCLEP_BOTH
#endif

constexpr int kMaxLocalRanks = 72;  // of one NVLink domain
constexpr int kMaxDomains = 64;
constexpr int kMaxRanks = 512;
constexpr int kWarpSize = 32;
// Kernels have a lane, or a bit, for each rank of an NVLink domain.  For domains of more ranks than
// a warp has lanes they are compiled once more, by the files in wide/, with a lane for several
// ranks: one of each group of 32.
#ifndef NCCLEP_RANK_GROUPS
#define NCCLEP_RANK_GROUPS 1
#endif
constexpr int kRankGroups = NCCLEP_RANK_GROUPS;  // of the kernels that are being compiled
constexpr int kMaxRankGroups = (kMaxLocalRanks + kWarpSize - 1) / kWarpSize;
static_assert(kRankGroups == 1 || kRankGroups == kMaxRankGroups);
constexpr int kMaxTopK = 32;
constexpr int kMaxExperts = 4096;
constexpr int kMaxLocalExperts = 512;  // of one rank
constexpr int kMaxTokens = 65536;
// Far longer than any row, and small enough that sizes of its pieces fit in int.
constexpr int kMaxRowBytes = 1 << 30;
// Tokens are counted, and their sums flagged, in chunks of this many.
constexpr int kChunk = 128;
constexpr int num_chunks_of(int num_tokens) {
  return num_tokens / kChunk + (num_tokens % kChunk != 0);
}
// Pairs of a source whose sums are computed, and flagged, together.
constexpr int kUnit = 32;
// Rows of x are staged, and flagged, in at most this many phases.
constexpr int kPhases = 9;

enum class Phase : std::uint32_t {
  kNone = ncclepPhaseNone,
  kPlan = ncclepPhasePlan,
  kRoutes = ncclepPhaseRoutes,
  kDispatch = ncclepPhaseDispatch,
  kCombine = ncclepPhaseCombine,
  kLowLatencyDispatch = ncclepPhaseLowLatencyDispatch,
  kLowLatencyCombine = ncclepPhaseLowLatencyCombine
};

// Why a group has failed on this rank: another rank was late, is in a different call, or refused a
// call; or this rank's low-latency calls did not alternate.
enum class Reason : std::uint32_t {
  kNone = ncclepReasonNone,
  kLate = ncclepReasonLate,
  kDiffers = ncclepReasonDiffers,
  kRefused = ncclepReasonRefused,
  kOutOfTurn = ncclepReasonOutOfTurn
};

// Each signal from one rank to another is one word, which only the sender writes.
enum Signal : int { kRoutesWritten, kReceived, kNumSignals };

// What rail peers signal to each other over the network (device/rails.cuh), each for itself.
enum RailSignal : int {
  kStopPut,
  kEntryPut,
  kRequestsPut,
  kCountsPut,
  kRoutesPut,
  kRowsPut,
  kSumsPut,
  kPulledPut,  // rounds of a dispatch whose place is free, and of a combine
  kAddedUpPut,
  kTokensPut,  // of low-latency mode
  kTokenSumsPut,
  kLastPut,  // nothing follows: the windows close
  kNumRailSignals
};

// Routes that a rank writes into its own window for another to fetch.
struct PairRoute {
  std::int32_t token, first_assignment;
};
struct AssignmentRoute {
  // Local expert << 16 | index among the writer's assignments for this expert.
  std::uint32_t in_expert;
  std::int32_t index;  // token * K + k
};

// The control window of each rank.  `[r]` is written by rank r, or, where it says so, for rank r.
struct Control {
  int num_ranks, num_experts;
  int max_tokens;  // a multiple of kChunk, so every array starts at a multiple of 8 bytes
  int max_top_k;
  int num_domains = 1;  // of NVLink, each of as many ranks, one after the other (rail_layout.h)
  int num_rounds = 1;   // in which max_tokens are dispatched and combined; 1 within one domain

  NCCLEP_BOTH int max_chunks() const { return (max_tokens + kChunk - 1) / kChunk; }
  // Tokens, or node tokens of a domain, of a round: a multiple of kChunk.
  NCCLEP_BOTH int round_tokens() const {
    return (max_chunks() + num_rounds - 1) / num_rounds * kChunk;
  }
  NCCLEP_BOTH int max_phases() const { return num_rounds * kPhases; }
  NCCLEP_BOTH int max_units() const { return max_tokens / kUnit; }
  NCCLEP_BOTH int num_local() const { return num_experts / num_ranks; }
  NCCLEP_BOTH int local_ranks() const { return num_ranks / num_domains; }
  // Of the kernels for this group.
  int rank_groups() const { return local_ranks() <= kWarpSize ? 1 : kMaxRankGroups; }
  NCCLEP_BOTH int domain_of(int rank) const { return rank / local_ranks(); }
  NCCLEP_BOTH int local_rank_of(int rank) const { return rank % local_ranks(); }
  NCCLEP_BOTH std::size_t assignments() const {
    return static_cast<std::size_t>(max_tokens) * max_top_k;
  }

  // uint64 [kNumSignals][R]: epochs.
  NCCLEP_BOTH std::size_t signals() const { return 0; }
  // uint64 [2][R]: the call that rank r has entered (device/call_barrier.cuh); two, for consecutive
  // calls.
  NCCLEP_BOTH std::size_t entries() const { return signals() + kNumSignals * num_ranks * 8; }
  // uint64 [1]: the rank that has stopped, and when (device/wait.cuh); 0: none.
  NCCLEP_BOTH std::size_t stop() const { return entries() + 2 * num_ranks * 8; }
  // uint64 [2][R][experts of a rank + 1]: rank r's assignments for each of my experts, then its
  // pairs on this rank; with the number of the plan (device/wait.cuh).  Why two: see plan/plan.cu.
  NCCLEP_BOTH std::size_t counts() const { return stop() + 8; }
  // uint64 [R][E]: the same for all experts, before anything is dropped; in static mode only.
  NCCLEP_BOTH std::size_t requested() const {
    return counts() + static_cast<std::size_t>(2) * num_ranks * (num_local() + 1) * 8;
  }
  // uint64 [R][num_rounds * kPhases]: epoch of the dispatch whose rows of this phase of all rounds
  // are in rank r's window.
  NCCLEP_BOTH std::size_t staged() const {
    return requested() + static_cast<std::size_t>(num_ranks) * num_experts * 8;
  }
  // uint64 [R][chunks]: epoch of the combine whose sums for my chunk rank r has pushed.
  NCCLEP_BOTH std::size_t pushed() const {
    return staged() + static_cast<std::size_t>(num_ranks) * max_phases() * 8;
  }
  // The next three are used by this rank alone: uint64 [R][units]: epoch of the combine that has
  // computed the sums of a unit of rank r's pairs.
  NCCLEP_BOTH std::size_t added() const {
    return pushed() + static_cast<std::size_t>(num_ranks) * max_chunks() * 8;
  }
  // uint32 [R][units], [R][chunks]: how many sums of their pairs are computed, and are pushed.
  NCCLEP_BOTH std::size_t num_added() const {
    return added() + static_cast<std::size_t>(num_ranks) * max_units() * 8;
  }
  NCCLEP_BOTH std::size_t num_pushed() const {
    return num_added() + static_cast<std::size_t>(num_ranks) * max_units() * 4;
  }
  // float [2][R][T * K]: weights of rank r's assignments; two, for consecutive dispatches.
  NCCLEP_BOTH std::size_t weights() const {
    return num_pushed() + static_cast<std::size_t>(num_ranks) * max_chunks() * 8;
  }
  // float [T * K]: the values that combine returns for my assignments.
  NCCLEP_BOTH std::size_t values() const { return weights() + 2 * num_ranks * assignments() * 4; }
  // AssignmentRoute [R][T * K], for rank r to fetch: my assignments for it, by token and local
  // expert.
  NCCLEP_BOTH std::size_t assignment_routes() const { return values() + assignments() * 4; }
  // PairRoute [R][T], for rank r to fetch.
  NCCLEP_BOTH std::size_t pair_routes() const {
    return assignment_routes() + num_ranks * assignments() * sizeof(AssignmentRoute);
  }
  // int32 [R][chunks + 1], for rank r to fetch: my pairs there before each chunk of my tokens.
  NCCLEP_BOTH std::size_t chunk_pairs() const {
    return pair_routes() + static_cast<std::size_t>(num_ranks) * max_tokens * sizeof(PairRoute);
  }
  NCCLEP_BOTH std::size_t num_bytes() const {
    return chunk_pairs() + static_cast<std::size_t>(num_ranks) * (max_chunks() + 1) * 4;
  }
};

// One bit for each rank.
constexpr int kRankWords = kMaxRanks / 32;
struct RankBits {
  volatile std::uint32_t words[kRankWords];
};

// In mapped host memory: written by the device, polled by the host.
struct Mailbox {
  // Of a plan that the host waits for, each with the host's ticket in the upper half: rows, pairs,
  // assignments, and 1 + the lowest rank whose routing names an invalid expert, or one expert
  // twice; 0: none.
  volatile std::uint64_t sizes[4];
  // Likewise the rows of each expert's block.
  volatile std::uint64_t rows_of_expert[kMaxLocalExperts];
  // All such ranks, in the plans that the host did not wait for, until it has read them.
  RankBits bad_ranks;
  // Likewise of low-latency dispatches.
  RankBits bad_low_latency;
  // Why the group has failed: the reason, the rank that caused it, and the phase; the calls of this
  // rank and that one, if they differ, or if it has entered the call in which it is late.
  // `failed_phase` is written last.
  std::uint32_t failed_reason;
  std::int32_t failed_peer;
  std::uint64_t failed_epoch, failed_deadline_ns, failed_calls[2];
  volatile std::uint32_t failed_phase;
};

// Places of one of NCCL's queues, counted from its beginning.
struct QueuePlaces {
  unsigned long long given;  // to puts
  std::uint64_t room;        // up to here there was room
};

// In device memory of one rank; zero at the start.
struct State {
  std::uint64_t epoch;       // operations that are over
  std::uint64_t plans;       // plans that are over
  std::uint64_t received;    // the last plan whose routes were received; 0: none in these windows
  std::uint64_t dispatches;  // each round counts
  std::uint64_t dispatch_calls;  // with all their rounds
  std::uint64_t entries;         // calls that were entered (device/call_barrier.cuh) and are over
  std::uint64_t waited_ns;       // in total, for other ranks to enter this rank's calls
  unsigned int arrived;          // at the current operation's grid barriers, all counted together
  unsigned int leaving;          // CTAs of the current operation that are done
  unsigned int next;             // next work item that no warp has taken (device/work_counter.cuh)
  unsigned int failed;           // kernels do no more work, and fill their outputs with NaN
  unsigned int is_bad;           // this rank's routing in the current plan
  std::uint64_t rail_signals[kNumRailSignals];  // that operations which are over have waited for
  unsigned int staged[kPhases];     // CTAs that have staged their part of each phase, in one domain
  unsigned int put_phases;          // phases of the current dispatch that were put to rail peers
  QueuePlaces queues[kMaxDomains];  // NCCL's, in which puts wait for the network
};

// One window of each rank of this NVLink domain.
template <int kGroups>
struct DomainWindowsOf {
  char* of_local_rank[kGroups * kWarpSize];
  int first_rank;

  NCCLEP_BOTH char* operator[](int rank) const { return of_local_rank[rank - first_rank]; }
};

// Passed to every kernel of a group.
template <int kGroups>
struct KernelContextOf {
  Control control;
  int rank;
  DomainWindowsOf<kGroups> control_of;  // by rank
  DomainWindowsOf<kGroups> rows_of;     // likewise: two halves for dispatch, then combine's
  std::size_t dispatch_bytes;           // of one half
  State* state;
  Mailbox* mailbox;
  std::uint64_t deadline_ns;
  // The arguments that must be equal on all ranks (host/call_signature.h); 0 where the hosts have
  // agreed on them.
  std::uint64_t call;
};

using DomainWindows = DomainWindowsOf<kRankGroups>;
using KernelContext = KernelContextOf<kRankGroups>;

}  // namespace ncclep::native
