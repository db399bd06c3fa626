// Which pairs a warp takes, and the book-keeping of those it has finished.
#pragma once

#include <cuda_runtime.h>

#include "native/device/wait.cuh"
#include "native/plan/plan.h"
#include "native/rails/phases.cuh"
#include "native/rows/combine.h"
#include "native/rows/ring.cuh"
#include "native/state.h"

namespace ncclep::native {

// The warps that share the pairs of other ranks: `num_warps` in each of `num_ctas` CTAs.
struct WarpSlice {
  int num_ctas, num_warps;
  int cta;  // this CTA's index among them
};

// The pairs that one warp of a slice takes, in order: all from one source whose sums this rank
// sends to another rank, with a stride of the warps for that source, so that all are served at any
// time and all warps end at the same time.
template <typename R>
class PairIterator {
 public:
  __device__ PairIterator(const KernelContext& ctx, const Combine& job, const Round& round,
                          const WarpSlice& slice, int warp) {
    const Control& layout = ctx.control;
    // It sums up for its rail peers itself.
    const int others = layout.num_ranks - (R::kEnabled ? layout.num_domains : 1);
    if (others == 0) return;
    const int index = warp * slice.num_ctas + slice.cta, warps = slice.num_warps * slice.num_ctas;
    if constexpr (R::kEnabled) {
      const int number = index % others, locals = layout.local_ranks();
      source = (layout.domain_of(ctx.rank) + number / (locals - 1)) % layout.num_domains * locals +
               (layout.local_rank_of(ctx.rank) + 1 + number % (locals - 1)) % locals;
    } else {
      source = (ctx.rank + 1 + index % others) % layout.num_ranks;
    }
    step_ = (warps - index % others + others - 1) / others;  // warps for this rank
    turn_ = index / others;
    begin(job, round);
  }

  // Goes to a round, with several domains.
  __device__ void begin(const Combine& job, const Round& round) {
    if (step_ == 0) return;
    first_ = first_pair<R>(job.routes, round, source);
    end_ = end_pair<R>(job.routes, round, source);
    next_ = first_ + turn_;
  }

  // Goes to the next pair; false when there is none in the round.
  __device__ bool next() {
    if (next_ >= end_) return false;
    pair = next_;
    next_ += step_;
    return true;
  }

  __device__ bool has_source() const { return step_ > 0; }
  // The pair's unit.
  __device__ int unit() const { return (pair - first_) / kUnit; }

  int source = 0, pair = 0;

 private:
  int first_ = 0, next_ = 0, end_ = 0, step_ = 0, turn_ = 0;
};

// The pairs that the warps of a CTA have finished, published by one of them: fences stall the whole
// SM, so they are issued only now and then, for all warps together.
struct CompletionTracker {
  int num_done[kWarps];  // pairs of each warp
  int is_over[kWarps];   // there will be no more

  __device__ void clear() {
    if (threadIdx.x < kWarps) num_done[threadIdx.x] = is_over[threadIdx.x] = 0;
  }

  // Called by one thread of the warp after its work on a pair; `num` counts from 1.
  __device__ void record(int warp, int num) {
    __threadfence_block();
    show(&num_done[warp], num);
  }
  __device__ void close(int warp) {
    __threadfence_block();
    show(&is_over[warp], 1);
  }
};

// Pairs of one source that a lane counts off together: looking one up takes a few dependent loads,
// and a warp may finish several pairs between fences.
struct Batch {
  static constexpr int kSize = 4;
  int source;
  int pairs[kSize];  // -1: none
};

// Counts pairs off, each in its group: a unit, or a chunk.  Called by one lane.
//
//   counts           of the groups; 0 again when a group is complete
//   group_of(pair)   its group
//   size_of(group)   pairs that it has
//   complete(group)  called for a group when its last pair is counted off; its stores, even relaxed
//                    ones, pass on everything that all counting lanes had fenced before
template <typename GroupOf, typename SizeOf, typename Complete>
__device__ void count_off(const Batch& batch, unsigned int* counts, GroupOf&& group_of,
                          SizeOf&& size_of, Complete&& complete) {
  int group[Batch::kSize], left[Batch::kSize];
#pragma unroll
  for (int i = 0; i < Batch::kSize; ++i) {
    group[i] = batch.pairs[i] < 0 ? -1 : group_of(batch.pairs[i]);
  }
  bool completes = false;
#pragma unroll
  for (int i = 0; i < Batch::kSize; ++i) {
    if (group[i] < 0) continue;
    left[i] = size_of(group[i]) - 1 - static_cast<int>(atomicAdd(counts + group[i], 1u));
    completes = completes || left[i] == 0;
  }
  if (completes) fence_system();
#pragma unroll
  for (int i = 0; i < Batch::kSize; ++i) {
    if (group[i] < 0 || left[i] != 0) continue;
    counts[group[i]] = 0;
    complete(group[i]);
  }
}

constexpr int kBookPauses = 8, kBookPauseNs = 500;

// Calls publish(batch) for the pairs that a warp of the slice has finished, once what the warp
// wrote for them is visible to all ranks.  Called by one warp, whose lane i follows warp i.
template <typename R, typename Publish>
__device__ void track_completion(const KernelContext& ctx, const Combine& job,
                                 const WarpSlice& slice, CompletionTracker& tracker,
                                 Publish&& publish) {
  const int lane = threadIdx.x % kWarpSize;
  const bool follows = lane < slice.num_warps;
  PairIterator<R> iterator(ctx, job, first_round<R>(job), slice, follows ? lane : 0);
  int num_published = 0, round = 0;
  const auto has_next = [&] {
    if constexpr (R::kEnabled) {
      for (const int num_rounds = num_rounds_of(job); round < num_rounds;) {
        if (iterator.next()) return true;
        if (++round < num_rounds) iterator.begin(job, round_of(job, round));
      }
      return false;
    } else {
      return iterator.next();
    }
  };
  for (bool is_over = false; !is_over;) {
    for (int pause = 0; pause < kBookPauses && !is_over; ++pause) {
      __nanosleep(kBookPauseNs);
      is_over = __all_sync(~0u, !follows || look(&tracker.is_over[lane]) != 0);
    }
    __threadfence_block();  // when it is over, the numbers that follow are the last
    const int done = follows ? look(&tracker.num_done[lane]) : 0;
    if (!__any_sync(~0u, num_published < done)) continue;
    fence_system();
    for (; num_published < done; num_published = min(num_published + Batch::kSize, done)) {
      Batch batch{iterator.source, {}};
#pragma unroll
      for (int i = 0; i < Batch::kSize; ++i) {
        batch.pairs[i] = num_published + i < done && has_next() ? iterator.pair : -1;
      }
      publish(batch);
    }
    __syncwarp();
  }
}

}  // namespace ncclep::native
