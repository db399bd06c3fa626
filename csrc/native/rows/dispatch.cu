// One kernel, two kinds of CTAs (cta_roles.h).
//
// *Staging* CTAs copy this rank's rows (those that go to other ranks) into its window, and signal
// each finished phase to every rank.  Phases are few, because a fence stalls a whole SM.  The first
// ones are small, and all CTAs stage the very first, because nothing can be pulled before they are
// over.  When everything is staged, these CTAs pull too.
//
// *Pulling* warps claim rows from a work counter, fetch a row over NVLink once, into a ring of
// stages in shared memory, and store it to all of its slots from there; each waits only for the
// phase that its next row belongs to.  The *watching* warp of a CTA polls for phases that other
// ranks have finished and tells the pulling warps through shared memory, where polling costs almost
// nothing.  When it has seen all phases, it puts the weights into their slots.
//
// With several NVLink domains (rail_layout.h), staging CTAs also pack the rows of node tokens, in
// the phases of their tokens, and put each phase to the rail peers.  A warp of the last CTA waits
// for what the rail peers put, and signals it to the ranks of this domain as their own.  With
// rounds (rails/rounds.cuh) all this goes on round by round.
//
// The window has two halves, for consecutive dispatches, or rounds: a rank that is still pulling
// the previous dispatch is not disturbed by this one.  No rank still pulls the one before that,
// whose half is reused now: all ranks had entered the previous dispatch when this rank left it
// (device/call_barrier.cuh).
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.h"
#include "native/device/call_barrier.cuh"
#include "native/device/wait.cuh"
#include "native/device/warp.cuh"
#include "native/device/work_counter.cuh"
#include "native/rails/phases.cuh"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"
#include "native/rows/progress.cuh"
#include "native/rows/ring.cuh"
#include "native/rows/stage.cuh"

namespace ncclep::native {

namespace {

__device__ void zero_with_warp(char* to, int bytes, int lane) {
  for (int i = lane; i < bytes / 16; i += kWarpSize) {
    reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ void zero_row(const Dispatch& job, std::int64_t row, int lane) {
  zero_with_warp(job.rows + row * job.row_bytes, job.row_bytes, lane);
  if (job.has_weights && lane == 0) job.row_w[row] = 0;
}

// Zeros the padding rows of blocks; where rows after the last block stay as they are, their
// weights.
__device__ void zero_padding(const KernelContext& ctx, const Dispatch& job, int num_ctas) {
  const int num_local = ctx.control.num_experts / ctx.control.num_ranks;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize, warps = kWarps * num_ctas;
  std::int64_t end = 0;
  for (int expert = 0; expert < num_local; ++expert) {
    const std::int64_t start = end;
    end += job.tokens_per_expert[expert];
    for (std::int64_t row = start + job.routed_per_expert[expert] + warp; row < end; row += warps) {
      zero_row(job, row, lane);
    }
  }
  if (!job.leaves_unused || !job.has_weights) return;
  const int first = warp * kWarpSize + lane, step = warps * kWarpSize;
  for (std::int64_t row = end + first; row < job.num_rows; row += step) job.row_w[row] = 0;
}

// Zeros the rows after the last block.  With much room they are most of what a dispatch stores, so
// all warps do it, once the other rows are in their slots.
__device__ void zero_unused(const KernelContext& ctx, const Dispatch& job) {
  const int num_local = ctx.control.num_experts / ctx.control.num_ranks;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize, warps = kWarps * gridDim.x;
  int end = 0;  // of the last block
  for (int expert = lane; expert < num_local; expert += kWarpSize) {
    end += static_cast<int>(job.tokens_per_expert[expert]);
  }
  end = warp_sum(end);
  for (std::int64_t row = end + warp; row < job.num_rows; row += warps) zero_row(job, row, lane);
}

// Puts the weights of all rows but padding into their slots, once all have arrived.  Called by
// one warp of each CTA: CTAs share the assignments of each source or, where many sources have few
// each, the sources.
template <typename R>
__device__ void place_weights(const KernelContext& ctx, const Dispatch& job, std::uint64_t parity) {
  const ReceivedRoutes& routes = job.routes;
  const int ctas = gridDim.x, num_ranks = ctx.control.num_ranks;
  const bool shares_sources = R::kEnabled && num_ranks > kWarpSize;
  const int step = (shares_sources ? 1 : ctas) * kWarpSize,
            start = (shares_sources ? 0 : blockIdx.x * kWarpSize) + threadIdx.x % kWarpSize;
  for (int source = shares_sources ? blockIdx.x : 0; source < num_ranks;
       source += shares_sources ? ctas : 1) {
    const float* weights =
        source == ctx.rank
            ? job.w
            : weights_at(ctx,
                         R::kEnabled && !is_local(ctx, source) ? host_of(ctx, source) : ctx.rank,
                         source, parity);
    const int end = routes.pair_first[routes.first_pair[source + 1]];
    int assignment = routes.pair_first[routes.first_pair[source]] + start;
    for (; assignment < end; assignment += kUnroll * step) {
      int slot[kUnroll], index[kUnroll];
      float weight[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (assignment + u * step >= end) break;
        slot[u] = routes.assignment_slot[assignment + u * step];
        index[u] = routes.assignment_index[assignment + u * step];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (assignment + u * step < end) weight[u] = __ldcg(weights + index[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (assignment + u * step < end) job.row_w[slot[u]] = weight[u];
      }
    }
  }
}

// All tokens, in one domain.
__device__ Round all_at_once(const Dispatch& job) {
  return {0, 0, job.most_tokens, job.num_phases};
}

// The number of phases of a source up to the last that has rows for this rank.
template <typename R>
__device__ int needed_phases(const KernelContext& ctx, const Dispatch& job, int source) {
  if (source == ctx.rank) return 0;
  const int first = job.routes.first_pair[source], end = job.routes.first_pair[source + 1];
  if (end == first) return 0;
  const int token = job.routes.pair_token[end - 1];
  if constexpr (R::kEnabled) {
    const Round round = round_of(job, token / job.round_tokens);
    return number_of_phase<R>(round, phase_of<R>(round, token)) + 1;
  }
  return phase_of<R>(all_at_once(job), token) + 1;
}

// The items that a warp takes: those of a round follow those of the last one.
struct ItemsOfWarp {
  WorkCounter counter;
  int last = 0;  // taken; of the next round if it is not of this one
  int end = 0;   // of the round
};

// Pulls a round's rows into their slots until all of them are taken.  Called by one warp.  False if
// rows will not come: then there is no next round for this warp.
template <typename R>
__device__ bool pull(const KernelContext& ctx, const Dispatch& job, const Round& round,
                     const RingShape& shape, Ring& ring, Progress& progress,
                     ItemsOfWarp& warp_items, std::uint64_t parity, std::uint64_t epoch) {
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize, num_ranks = ctx.control.num_ranks;
  int most_pairs = 0;
  for (int source = lane; source < num_ranks; source += kWarpSize) {
    most_pairs =
        max(most_pairs, end_pair<R>(routes, round, source) - first_pair<R>(routes, round, source));
  }
  most_pairs = __reduce_max_sync(~0u, most_pairs);
  if constexpr (R::kEnabled) most_pairs = max(1, most_pairs);  // somebody counts the items
  const int items = most_pairs * num_ranks * shape.pieces;
  const int first_item = R::kEnabled ? warp_items.end : 0;
  int item = warp_items.last - first_item, num_taken = 0;
  bool is_taken = R::kEnabled && round.number > 0;  // `item`
  warp_items.end += items;

  // Routes are prefetched: the range of assignments of the item after the next one, and the slots
  // of the next one.
  struct Item {
    bool is_valid = false;
    int source = 0, piece = 0, token = 0, first = 0, end = 0;
    int slot = -1;  // of this lane's assignment
  };
  const auto find = [&] {
    Item found;
    while (item < items && !found.is_valid) {
      if (!R::kEnabled || !is_taken) item = warp_items.counter.take() - first_item;
      is_taken = false;
      if (item >= items) break;
      ++num_taken;
      const int turn = item / shape.pieces;
      // Consecutive items alternate between ranks, so that the warps pull from all ranks at any
      // time.
      found.source = (ctx.rank + 1 + turn) % num_ranks;
      const int pair = first_pair<R>(routes, round, found.source) + turn / num_ranks;
      if (pair >= end_pair<R>(routes, round, found.source)) continue;
      found.is_valid = true;
      found.piece = item % shape.pieces;
      found.token = routes.pair_token[pair];
      found.first = routes.pair_first[pair];
      found.end = routes.pair_first[pair + 1];
    }
    return found;
  };
  const auto find_slots = [&](Item& found) {
    if (!found.is_valid || lane >= found.end - found.first) return;
    found.slot = routes.assignment_slot[found.first + lane];
  };
  Item following = find(), second = find();
  find_slots(following);

  // The contents of each stage: this lane's slot, and the part of the row.
  std::int64_t slot[kRingStages];
  int offset[kRingStages], bytes[kRingStages];
  Seen seen;

  // Starts loading this warp's next row; false when there is none.
  const auto load = [&](int s) -> bool {
    const Item now = following;
    if (!now.is_valid) return false;
    following = second;
    second = find();
    find_slots(following);
    if (now.source != ctx.rank &&
        !seen.wait_for_unit(progress, now.source,
                            number_of_phase<R>(round, phase_of<R>(round, now.token)))) {
      return following.is_valid = false;
    }
    offset[s] = now.piece * shape.piece_bytes;
    bytes[s] = min(shape.piece_bytes, job.row_bytes - offset[s]);
    if (lane == 0) {
      const bool is_own = now.source == ctx.rank;
      const char* base = is_own ? job.x : rows_from<R>(ctx, now.source, parity);
      const int row_index =
          is_own ? now.token : row_in_round<R>(ctx, job.rail_routes, round, now.source, now.token);
      start_load(ring.pieces + s * shape.piece_bytes,
                 base + static_cast<std::size_t>(row_index) * job.row_bytes + offset[s], bytes[s],
                 ring.full + s);
    }
    slot[s] = now.slot;
    return true;
  };

  const auto store = [&](int s) {
    if (slot[s] < 0) return;
    start_store(job.rows + slot[s] * job.row_bytes + offset[s], ring.pieces + s * shape.piece_bytes,
                bytes[s]);
  };
  ring.run(load, store, [](int) {});
  if constexpr (R::kEnabled) {
    warp_items.last = first_item + item;
    const bool is_last = count_done(ctx, kPulling, round.number, num_taken, items);
    if (is_last && lane == 0) tell_of_round(ctx, false, round.number, epoch);
  }
  return item >= items;
}

template <typename R>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1)
    dispatch_kernel(KernelContext ctx, Dispatch job, RingShape shape, DispatchSplit split,
                    const __grid_constant__ R rails) {
  extern __shared__ __align__(128) char pieces[];
  __shared__ __align__(8) std::uint64_t full[kMaxRingWarps][kRingStages];
  __shared__ Progress progress;
  const std::uint64_t epoch = current_epoch(ctx), entry = current_entry(ctx);
  const std::uint64_t dispatches =
      *static_cast<volatile std::uint64_t*>(&ctx.state->dispatches) + 1;
  const std::uint64_t calls = *static_cast<volatile std::uint64_t*>(&ctx.state->dispatch_calls) + 1;
  const std::uint64_t parity = dispatches % 2;
  const int warp = threadIdx.x / kWarpSize;
  progress.clear();
  if (!had_failed(ctx)) {
    if (blockIdx.x == 0) enter(ctx, rails, Phase::kDispatch, entry, epoch);
    const int ring_index = warp - 1;
    const bool has_ring = ring_index >= 0 && ring_index < shape.warps;
    Ring ring{pieces + (has_ring ? ring_index * kRingStages * shape.piece_bytes : 0),
              full[has_ring ? ring_index : 0]};
    if (has_ring) ring.init();
    const bool is_staging = static_cast<int>(blockIdx.x) < split.staging;
    if constexpr (R::kEnabled) {
      stage_rounds(ctx, rails, job, shape, ring, split, parity, calls, entry, epoch);
    } else {
      const Round round = all_at_once(job);
      stage(ctx, rails, job, round, shape, ring, gridDim.x, 0, 1, parity, calls, epoch);
      if (is_staging) {
        stage(ctx, rails, job, round, shape, ring, split.staging, 1, job.num_phases, parity, calls,
              epoch);
      }
    }
    if (is_staging) zero_padding(ctx, job, split.staging);
    if (warp == 0) {
      if (!R::kEnabled && blockIdx.x == 0) {
        compare_entries(ctx, rails, Phase::kDispatch, entry, epoch);
      }
      const auto flag = [&](int source, int phase) {
        return staged_flags<R>(ctx, ctx.rank, source) + phase;
      };
      const auto needed = [&](int source) { return needed_phases<R>(ctx, job, source); };
      watch<R>(ctx, Phase::kDispatch, epoch, needed, flag, progress);
      if (job.has_weights && !has_failed(ctx)) place_weights<R>(ctx, job, calls % 2);
    } else if (has_ring) {
      ItemsOfWarp items{WorkCounter(ctx)};
      if constexpr (R::kEnabled) {
        bool goes_on = true;
        for (int number = 0; number < num_rounds_of(job) && goes_on; ++number) {
          goes_on = pull<R>(ctx, job, round_of(job, number), shape, ring, progress, items,
                            (parity + number) % 2, epoch);
        }
      } else {
        pull<R>(ctx, job, all_at_once(job), shape, ring, progress, items, parity, epoch);
      }
    } else if constexpr (R::kEnabled) {
      // Two warps that hold up no others.
      const int cta = warp == kWarps - 1 ? gridDim.x - blockIdx.x : 0;  // from the last, 1, on
      if (cta == 1) pass_phases_on(ctx, rails, job, epoch);
      if (cta == 2) {
        compare_entries(ctx, rails, Phase::kDispatch, entry, epoch);
        pass_rounds_on(ctx, rails, job, epoch);
      }
    }
    if (!job.leaves_unused) zero_unused(ctx, job);
  }
  if (!leave(ctx)) return;
  if (has_failed(ctx)) {
    fill_nan(job.rows, job.num_rows * job.row_bytes);
    if (job.has_weights) fill_nan(job.row_w, job.num_rows * sizeof(float));
  }
  if constexpr (R::kEnabled) clear_rounds(ctx);
  if (threadIdx.x == 0) {
    const int num_rounds = R::kEnabled ? num_rounds_of(job) : 1;
    ctx.state->dispatches = dispatches + num_rounds - 1;
    ctx.state->dispatch_calls = calls;
    leave_call<R>(ctx, entry);
    if constexpr (R::kEnabled) {
      count_signals<R>(ctx, kRowsPut, num_rounds * num_phases_in(job));
      count_signals<R>(ctx, kPulledPut, num_rounds - 1);
    }
    ctx.state->epoch = epoch;
  }
}

}  // namespace

template <>
std::size_t dispatch_shared_bytes<kRankGroups>() {
  return shared_bytes_of("dispatch", dispatch_kernel<NoRails>, kRingBytes);
}

template <>
void dispatch(const KernelContext& ctx, const Dispatch& arguments, int num_sms,
              std::uintptr_t stream, const Rails* rails) {
  // With several domains warps beyond the rings pass on what comes from the others.
  const int row_bytes = arguments.row_bytes;
  const RingShape shape = rails != nullptr ? sending_ring_shape(row_bytes) : ring_shape(row_bytes);
  const DispatchSplit split = split_dispatch(num_sms);
  Dispatch job = arguments;
  job.round_tokens = ctx.control.round_tokens();
  with_rails(rails, [&](const auto& way) {
    launch_cooperatively("dispatch", dispatch_kernel<std::decay_t<decltype(way)>>, num_sms,
                         kWarps * kWarpSize, shape.shared_bytes(), stream, ctx, job, shape, split,
                         way);
  });
}

}  // namespace ncclep::native
