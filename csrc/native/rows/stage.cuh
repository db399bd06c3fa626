// Dispatch's staging CTAs: this rank's rows go into its window, phase by phase (dispatch.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/wait.cuh"
#include "native/rails/phases.cuh"
#include "native/rank_set.cuh"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"
#include "native/rows/ring.cuh"

namespace ncclep::native {

// Loads that a lane has in flight where a single warp of a CTA does all the work.
constexpr int kUnroll = 8;

// Writes the weights of a phase's tokens into all other ranks' windows; with rails into this rank's
// too, from where they are put.  Called by one warp of each staging CTA.
template <typename R>
__device__ void stage_weights(const KernelContext& ctx, const Dispatch& job, int num_ctas,
                              int start, int end, std::uint64_t parity) {
  const int step = num_ctas * kWarpSize;
  const int last = end * job.top_k;
  int i = start * job.top_k + blockIdx.x * kWarpSize + threadIdx.x % kWarpSize;
  for (; i < last; i += kUnroll * step) {
    float weight[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * step < last) weight[u] = job.w[i + u * step];
    }
    for (int local_rank = 0; local_rank < ctx.control.local_ranks(); ++local_rank) {
      const int rank = rank_at(ctx, local_rank);
      if (!R::kEnabled && rank == ctx.rank) continue;
      float* to = weights_at(ctx, rank, ctx.rank, parity);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * step < last) to[i + u * step] = weight[u];
      }
    }
  }
}

// Copies one warp's share of a phase's rows into this rank's window: to each row from `start` to
// `end` the row of the token `token_at(row_index)`, unless that is -1; `first` is at its start.
template <typename TokenAt>
__device__ void stage_rows(const Dispatch& job, const RingShape& shape, Ring& ring, int warp,
                           int num_warps, int first, int start, int end, char* window,
                           TokenAt&& token_at) {
  const int lane = threadIdx.x % kWarpSize;
  int row_index = start + warp, piece = 0;
  int token = row_index < end ? token_at(row_index) : -1;
  std::size_t offset[kRingStages];
  int bytes[kRingStages];
  const auto load = [&](int s) {
    while (row_index < end && token < 0) {
      row_index += num_warps;
      token = row_index < end ? token_at(row_index) : -1;
    }
    if (row_index >= end) return false;
    const int begin = piece * shape.piece_bytes;
    bytes[s] = min(shape.piece_bytes, job.row_bytes - begin);
    offset[s] = static_cast<std::size_t>(row_index - first) * job.row_bytes + begin;
    if (lane == 0) {
      start_load(ring.pieces + s * shape.piece_bytes,
                 job.x + static_cast<std::size_t>(token) * job.row_bytes + begin, bytes[s],
                 ring.full + s);
    }
    if (++piece == shape.pieces) {
      piece = 0;
      row_index += num_warps;
      token = row_index < end ? token_at(row_index) : -1;
    }
    return true;
  };
  const auto store = [&](int s) {
    if (lane == 0) start_store(window + offset[s], ring.pieces + s * shape.piece_bytes, bytes[s]);
  };
  ring.run(load, store, [](int) {});
}

// Stages the rows of this rank's tokens in its window and their weights in all others', phase by
// phase.  Called by the first `num_ctas` CTAs, where warp 0 of each handles the weights.
template <typename R>
__device__ void stage(const KernelContext& ctx, const R& rails, const Dispatch& job,
                      const Round& round, const RingShape& shape, Ring& ring, int num_ctas,
                      int first_phase, int end_phase, std::uint64_t parity, std::uint64_t calls,
                      std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const RankSet others = ~one_rank(layout.local_rank_of(ctx.rank));  // of this domain
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  char* window = ctx.rows_of[ctx.rank] + parity * ctx.dispatch_bytes;
  for (int phase = first_phase; phase < end_phase; ++phase) {
    const int start = phase_start<R>(round, phase), next = phase_start<R>(round, phase + 1);
    const int end = min(next, job.num_tokens);
    if (warp == 0) {
      if (job.has_weights) stage_weights<R>(ctx, job, num_ctas, start, end, calls % 2);
    } else if (warp <= shape.warps) {
      const int number = (warp - 1) * num_ctas + blockIdx.x, warps = shape.warps * num_ctas;
      stage_rows(job, shape, ring, number, warps, round.begin, start, end, window,
                 [&](int row_index) {
                   return rank_sets(job.token_ranks)[row_index] & others ? row_index : -1;
                 });
      if constexpr (R::kEnabled) {
        const RailRows rows{ctx.dispatch_bytes, layout.num_domains};
        const int own = layout.domain_of(ctx.rank);
        for (int domain = 0; domain < layout.num_domains; ++domain) {
          if (domain == own) continue;
          const RailRoutes& routes = job.rail_routes;
          const std::int32_t* token_of = routes.token_of + std::int64_t{domain} * routes.num_tokens;
          stage_rows(job, shape, ring, number, warps, routes.num_sent(domain, round.begin),
                     routes.num_sent(domain, start), routes.num_sent(domain, next),
                     window + rows.sent(own, domain), [&](int node) { return token_of[node]; });
        }
      }
      fence_for_bulk_copies();
    }
    __syncthreads();
    const auto completes = [&] {
      __threadfence_system();  // for what all warps of the CTA wrote
      const int unit = number_of_phase<R>(round, phase);
      unsigned int* count = ctx.state->staged + unit;
      if constexpr (R::kEnabled) {
        const std::size_t counts = RailLayout{layout}.num_staged();
        count = reinterpret_cast<unsigned int*>(ctx.control_of[ctx.rank] + counts) + unit;
      }
      if (static_cast<int>(atomicAdd(count, 1u)) != num_ctas - 1) return false;
      *count = 0;
      fence_system();  // passes on what this thread saw through the other CTAs' fences
      for (int local_rank = 0; local_rank < layout.local_ranks(); ++local_rank) {
        store_relaxed(staged_flags<R>(ctx, rank_at(ctx, local_rank), ctx.rank) + unit, epoch);
      }
      return true;
    };
    if constexpr (R::kEnabled) {
      if (warp != 0) continue;
      if (!__any_sync(~0u, thread == 0 && completes())) continue;
      put_phase(ctx, rails, job, round, phase, parity, calls, epoch);
      __syncwarp();
    } else {
      if (thread == 0) completes();
    }
  }
}

// The same for all rounds, each when there is room for it.  The first phase is for all CTAs.
template <typename R>
__device__ void stage_rounds(const KernelContext& ctx, const R& rails, const Dispatch& job,
                             const RingShape& shape, Ring& ring, const DispatchSplit& split,
                             std::uint64_t parity, std::uint64_t calls, std::uint64_t entry,
                             std::uint64_t epoch) {
  const bool is_staging = static_cast<int>(blockIdx.x) < split.staging;
  const int of_round = num_phases_in(job), all = is_staging ? num_rounds_of(job) * of_round : 1;
  for (int i = 0; i < all; ++i) {
    const Round round = round_of(job, i / of_round);
    const int phase = i % of_round;
    if (phase == 0 && !wait_for_half(ctx, rails, round, entry, epoch)) return;
    stage(ctx, rails, job, round, shape, ring, i == 0 ? gridDim.x : split.staging, phase, phase + 1,
          (parity + round.number) % 2, calls, epoch);
  }
}

}  // namespace ncclep::native
