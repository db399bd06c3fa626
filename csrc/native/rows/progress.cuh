// Progress of other ranks or CTAs, polled by one warp of a CTA for all of its warps.
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

// Polls for all units of all sources.  Called by one warp, which has a group of sources at a time,
// one in each lane.
//
//   needed_of(source)   its units
//   flag(source, i)     where the flag of its unit i is
template <typename Needed, typename Flag>
__device__ void watch(const KernelContext& me, Phase phase, std::uint64_t epoch, Needed&& needed_of,
                      Flag&& flag, Progress& progress) {
  const int lane = threadIdx.x % kWarpSize, num_ranks = me.control.num_ranks;
  const int num_groups = (num_ranks + kWarpSize - 1) / kWarpSize, own_group = me.rank / kWarpSize;
  int group = own_group, at = me.rank % kWarpSize;  // the source that is polled
  int found = 0, needed = 0;
  const auto begin_group = [&] {
    const int mine = group * kWarpSize + lane;
    found = mine < num_ranks ? look(&progress.units[mine]) : 0;
    needed = mine < num_ranks ? needed_of(mine) : 0;
  };
  begin_group();
  Deadline deadline;
  bool sees_nothing = false;
  int turns = 0, num_complete = 0;  // groups that were complete, one after the other
  for (;;) {
    const std::uint32_t missing = __ballot_sync(~0u, found < needed);
    bool ends_turn = missing == 0;
    if (missing == 0) {
      if (++num_complete == num_groups) break;
    } else {
      num_complete = 0;
      do {
        at = (at + 1) % kWarpSize;
      } while (!(missing >> at & 1));
      const int source = group * kWarpSize + at;
      const int start = __shfl_sync(~0u, found, at), unit = start + lane;
      const int end = __shfl_sync(~0u, needed, at);
      const bool is_here = unit < end && load_relaxed(flag(source, unit)) >= epoch;
      const std::uint32_t absent = ~__ballot_sync(~0u, is_here);
      const int count = absent == 0 ? kWarpSize : __ffs(absent) - 1;
      if (count > 0) {
        fence_system();
        __syncwarp();
        __threadfence_block();  // lane 0 also publishes what other lanes have seen
        if (lane == at) found += count;
        if (lane == 0) show(&progress.units[source], start + count);
        deadline = {};
      } else if (__any_sync(~0u, deadline.has_passed(me, phase, source, epoch))) {
        break;
      }
      sees_nothing = sees_nothing && count == 0;
      ends_turn = ++turns % __popc(missing) == 0;
    }
    if (!ends_turn) continue;
    if (num_groups > 1) {
      group = (group + 1) % num_groups;
      __syncwarp();
      begin_group();
    }
    if (group == own_group) {
      if (sees_nothing) __nanosleep(kWatchPauseNs);
      sees_nothing = true;
    }
  }
  __threadfence_block();
  __syncwarp();
  if (lane == 0) show(&progress.is_over, 1);
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
