// The rounds of a dispatch or a combine over several NVLink domains (rail_layout.h).
//
// All of a call's rounds are one kernel, which is in two of them at a time: while the network still
// has rows, or sums, of one, the kernel stages or makes those of the next.  Whoever needs the room
// of an earlier round waits until those who used it say that they are done: a rank says so to its
// domain in a word, and to its rail peers with a signal.
//
// Why no rank waits for itself: a wait in a round is for what others do in an earlier round, or
// earlier in this one, and every warp is done with its work of a round, all of it stored and told,
// before it goes on to the next.  So of all waits one that is in the earliest round, and of these
// earliest in it, can end.
//
//   dispatch   a round is staged when the last but one is pulled, and pulled when it is staged
//   combine    ranks' sums are sent when those of the last round are added up; a domain's sums are
//              made when the sums over domains of the last but one are; those of a round when its
//              domains' sums, and those of the next round, are made
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/rail_layout.h"
#include "native/state.h"

namespace ncclep::native {

// Tokens of the batch, of any rank, in whole chunks.
template <typename Job>
__device__ int most_tokens_in(const Job& job) {
  return *job.rail_routes.most_chunks * kChunk;
}

// The rounds of a call: those that its batch needs, not its windows.
template <typename Job>
__device__ int num_rounds_of(const Job& job) {
  return max(1, (most_tokens_in(job) + job.round_tokens - 1) / job.round_tokens);
}

// The phases of each of them, which are those of whole chunks: the first two have half as many.
template <typename Job>
__device__ int num_phases_in(const Job& job) {
  return min(job.num_phases, min(most_tokens_in(job), job.round_tokens) / kChunk / 2 + 1);
}

// One of them: its tokens, and the phases in which they are staged or put.
struct Round {
  int number, begin, end, num_phases;
};

template <typename Job>
__device__ Round round_of(const Job& job, int number) {
  const int begin = number * job.round_tokens;
  return {number, begin, min(begin + job.round_tokens, most_tokens_in(job)), num_phases_in(job)};
}

template <typename R, typename Job>
__device__ Round first_round(const Job& job) {
  if constexpr (!R::kEnabled) return {};
  return round_of(job, 0);
}

// What a rank is done with.
enum RoundPart : int { kPulling = 0, kAddingRanks = 0, kAddingDomains = 1 };

// The word on `rank` in which the rank of this domain with this local rank tells of a round.
__device__ inline std::uint64_t* round_word(const KernelContext& ctx, int rank, bool is_combine,
                                            int local_rank, int round) {
  const RailLayout layout{ctx.control};
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[rank] + layout.rounds_over()) +
         (is_combine * layout.local_ranks() + local_rank) * ctx.control.num_rounds + round;
}

// Tells the ranks of this domain that this one is done with a round.  Called by one thread.
__device__ inline void tell_of_round(const KernelContext& ctx, bool is_combine, int round,
                                     std::uint64_t epoch) {
  fence_system();  // passes on what this thread saw of other warps
  const int own = ctx.control.local_rank_of(ctx.rank);
  for (int local_rank = 0; local_rank < ctx.control.local_ranks(); ++local_rank) {
    store_relaxed(round_word(ctx, rank_at(ctx, local_rank), is_combine, own, round), epoch);
  }
}

// Waits until a rank of this domain has told of a round; false when the group has failed.
__device__ inline bool wait_for_round(const KernelContext& ctx, Phase phase, int rank, int round,
                                      std::uint64_t epoch) {
  const bool is_combine = phase == Phase::kCombine;
  return wait_for(ctx, phase, rank,
                  round_word(ctx, ctx.rank, is_combine, ctx.control.local_rank_of(rank), round),
                  epoch);
}

__device__ inline unsigned int* num_done(const KernelContext& ctx, RoundPart part, int round) {
  return reinterpret_cast<unsigned int*>(ctx.control_of[ctx.rank] +
                                         RailLayout{ctx.control}.num_done()) +
         part * ctx.control.num_rounds + round;
}

// Counts items of a round that a warp is done with.  Called by the warp; true for all of its lanes
// if none of the `num_items` is left.  After a failure nothing is counted.
__device__ inline bool count_done(const KernelContext& ctx, RoundPart part, int round, int number,
                                  int num_items) {
  bool is_last = false;
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0 && number > 0 && !has_failed(ctx)) {
    __threadfence();
    is_last =
        static_cast<int>(atomicAdd(num_done(ctx, part, round), 0u + number)) + number == num_items;
  }
  return __any_sync(~0u, is_last);
}

// Calls step(domain, unit) for the units of all rail peers, each in order when `is_ready` says so
// of them, until all are over or gives_up(domain).  Called by one warp, whose lanes share the
// domains, so that none is held up by another.
template <typename IsReady, typename Step, typename GivesUp>
__device__ void for_units(const KernelContext& ctx, int num_units, IsReady&& is_ready, Step&& step,
                          GivesUp&& gives_up) {
  constexpr int kOfLane = kMaxDomains / kWarpSize;
  int over[kOfLane] = {};
  for (bool is_over = false; !is_over;) {
    is_over = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int domain = i * kWarpSize + threadIdx.x % kWarpSize;
      if (!has_rail_peer(ctx, domain) || over[i] == num_units) continue;
      if (is_ready(domain, over[i])) {
        step(domain, over[i]++);
      } else if (gives_up(domain)) {
        over[i] = num_units;
      }
      is_over = is_over && over[i] == num_units;
    }
  }
  __syncwarp();
}

// Called by all threads of the CTA that leaves last, with the context's part for rails.
__device__ inline void clear_rounds(const KernelContext& ctx) {
  const RailLayout layout{ctx.control};
  auto* counts = reinterpret_cast<unsigned int*>(ctx.control_of[ctx.rank] + layout.num_done());
  const int number = static_cast<int>((layout.end() - layout.num_done()) / sizeof(*counts));
  for (int i = threadIdx.x; i < number; i += blockDim.x) counts[i] = 0;
}

}  // namespace ncclep::native
