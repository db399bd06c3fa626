// Progress of other ranks or CTAs, polled by one warp of a CTA for all of its warps.
//
// Work arrives from each source in units, each with its own flag, which holds an epoch.  Reading a
// flag costs as much as moving a row, and ordering later accesses after it stalls a whole SM. So
// one *watching* warp polls the flags, and the others read its findings in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/bulk_copy.cuh"
#include "native/device/wait.cuh"
#include "native/rows/ring.cuh"
#include "native/state.h"

namespace ncclep::native {

constexpr int kWatchPauseNs = 500;

struct Progress {
  int units[kMaxRanks];  // of each source, without a gap
  int is_over;           // no more units will be seen: all are here, or a wait failed

  __device__ void clear() {
    for (int source = threadIdx.x; source < kMaxRanks; source += blockDim.x) units[source] = 0;
    if (threadIdx.x == 0) is_over = 0;
  }
};

// Polls for all units of all sources, each of a lane.  Called by one warp.
//
//   needed_of(source)   its units
//   flag(source, i)     where the flag of its unit i is
template <typename Needed, typename Flag>
__device__ void watch_units(const KernelContext& ctx, Phase phase, std::uint64_t epoch,
                            Needed&& needed_of, Flag&& flag, Progress& progress) {
  const int lane = threadIdx.x % kWarpSize;
  const bool is_source = lane < ctx.control.num_ranks;
  const int needed = is_source ? needed_of(lane) : 0;
  int source = ctx.rank, found = 0;  // the source that is polled, and the units of each lane's
  Deadline deadline;
  bool sees_nothing = false;
  for (int turns = 0;;) {
    const std::uint32_t missing = __ballot_sync(~0u, found < needed);
    if (missing == 0) break;
    do {
      source = (source + 1) % kWarpSize;
    } while (!(missing >> source & 1));
    const int start = __shfl_sync(~0u, found, source), unit = start + lane;
    const int end = __shfl_sync(~0u, needed, source);
    const bool arrived = unit < end && load_relaxed(flag(source, unit)) >= epoch;
    const std::uint32_t absent = ~__ballot_sync(~0u, arrived);
    const int count = absent == 0 ? kWarpSize : __ffs(absent) - 1;
    if (count > 0) {
      fence_system();
      __syncwarp();
      __threadfence_block();  // lane 0 also publishes what other lanes have seen
      if (lane == source) found += count;
      if (lane == 0) show(&progress.units[source], start + count);
      deadline = {};
    } else if (__any_sync(~0u, deadline.has_passed(ctx, phase, source, epoch))) {
      break;
    }
    sees_nothing = sees_nothing && count == 0;
    if (++turns % __popc(missing) != 0) continue;
    if (sees_nothing) __nanosleep(kWatchPauseNs);
    sees_nothing = true;
  }
}

// The same with several domains or many ranks in one, where there are many sources, with few units
// each: a lane looks at the next unit of each of its sources, and one fence is for all that have
// come.
template <typename Needed, typename Flag>
__device__ void watch_sources(const KernelContext& ctx, Phase phase, std::uint64_t epoch,
                              Needed&& needed_of, Flag&& flag, Progress& progress) {
  constexpr int kAtOnce = 4;  // loads in flight
  __shared__ std::uint16_t needed[kMaxRanks];
  const int lane = threadIdx.x % kWarpSize, num_ranks = ctx.control.num_ranks;
  for (int source = lane; source < num_ranks; source += kWarpSize) {
    needed[source] = static_cast<std::uint16_t>(needed_of(source));
  }
  for (Deadline deadline;;) {
    int missing = -1;  // a source of this lane
    bool sees_nothing = true;
    for (int first = lane; first - lane < num_ranks; first += kAtOnce * kWarpSize) {
      int found[kAtOnce] = {};
      bool is_missing[kAtOnce] = {}, arrived = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int source = first + i * kWarpSize;
        if (source < num_ranks) found[i] = look(&progress.units[source]);
        is_missing[i] = source < num_ranks && found[i] < needed[source];
      }
      std::uint64_t epochs[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_missing[i]) epochs[i] = load_relaxed(flag(first + i * kWarpSize, found[i]));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_missing[i]) missing = first + i * kWarpSize;
        is_missing[i] = is_missing[i] && epochs[i] >= epoch;  // no longer
        arrived = arrived || is_missing[i];
      }
      if (!__any_sync(~0u, arrived)) continue;
      sees_nothing = false;
      fence_system();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_missing[i]) show(&progress.units[first + i * kWarpSize], found[i] + 1);
      }
    }
    const std::uint32_t waiting = __ballot_sync(~0u, missing >= 0);
    if (waiting == 0) break;
    if (sees_nothing) {
      const int peer = __shfl_sync(~0u, missing, __ffs(waiting) - 1);
      if (__any_sync(~0u, deadline.has_passed(ctx, phase, peer, epoch))) break;
      __nanosleep(kWatchPauseNs);
    } else {
      deadline = {};
    }
  }
}

template <typename R, typename Needed, typename Flag>
__device__ void watch(const KernelContext& ctx, Phase phase, std::uint64_t epoch,
                      Needed&& needed_of, Flag&& flag, Progress& progress) {
  if constexpr (R::kEnabled || kRankGroups > 1) {
    watch_sources(ctx, phase, epoch, needed_of, flag, progress);
  } else {
    watch_units(ctx, phase, epoch, needed_of, flag, progress);
  }
  __threadfence_block();
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) show(&progress.is_over, 1);
}

// The part of a Progress that one other warp has seen.
class Seen {
 public:
  // Waits until unit `unit` of `source` is complete, so that its data may be loaded in bulk.  False
  // when it will never be.  All lanes call it.
  __device__ bool wait_for_unit(Progress& progress, int source, int unit) {
    const int lane = threadIdx.x % kWarpSize, at = source % kWarpSize, group = source / kWarpSize;
    const int seen = __shfl_sync(~0u, seen_, at);
    if (seen / kMostUnits == group && unit < seen % kMostUnits) return true;
    for (int units = 0; units <= unit;) {
      const bool is_over = look_with_warp(&progress.is_over) != 0;
      __threadfence_block();  // when it is over, the units that follow are the last
      units = look_with_warp(&progress.units[source]);
      if (lane == at) seen_ = group * kMostUnits + units;
      if (is_over && units <= unit) return false;
    }
    __threadfence_block();
    fence_for_bulk_copies();
    return true;
  }

 private:
  __device__ static int look_with_warp(int* word) {
    return __shfl_sync(~0u, threadIdx.x % kWarpSize == 0 ? look(word) : 0, 0);
  }

  static constexpr int kMostUnits = 1 << 16;
  static_assert(kMaxTokens / kUnit < kMostUnits && kPhases < kMostUnits);

  // Of the last source with the number of this lane in its group: the group, and its units.
  int seen_ = 0;
};

}  // namespace ncclep::native
