// The phases of a dispatch: which tokens they have, and how they get to other NVLink domains.
//
// `Job` is a Dispatch (rows/dispatch.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/bulk_copy.cuh"
#include "native/device/call_barrier.cuh"
#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/plan/plan.h"
#include "native/rails/rounds.cuh"
#include "native/state.h"

namespace ncclep::native {

// Phases are those of a round.  The first two have half as many tokens as the others.  The bounds
// are the same on all ranks.  With several domains they are those of chunks, so that the numbers of
// node tokens before them are known; phases may then have no tokens.
template <typename R>
__device__ int phase_unit() {
  return R::kEnabled ? kChunk : 1;
}

__device__ inline int halves_of(const Round& round) { return max(1, 2 * (round.num_phases - 1)); }

template <typename R>
__device__ int phase_start(const Round& round, int phase) {
  const int half = phase < 2 ? phase : 2 * (phase - 1), halves = halves_of(round);
  const int units = (round.end - round.begin) / phase_unit<R>();
  return round.begin + (units * half + halves - 1) / halves * phase_unit<R>();
}

// Of a token, or of a node token's name.
template <typename R>
__device__ int phase_of(const Round& round, int token) {
  const int half = (token - round.begin) / phase_unit<R>() * halves_of(round) /
                   ((round.end - round.begin) / phase_unit<R>());
  return half < 2 ? half : half / 2 + 1;
}

// Its number among the phases of all rounds.
template <typename R>
__device__ int number_of_phase(const Round& round, int phase) {
  return R::kEnabled ? round.number * round.num_phases + phase : phase;
}

// The pairs of a source in the round: from the first, up to the end.
template <typename R>
__device__ int first_pair(const ReceivedRoutes& routes, const Round& round, int source) {
  if constexpr (!R::kEnabled) return routes.first_pair[source];
  return routes.chunk_pair[source * (routes.num_chunks + 1) + round.begin / kChunk];
}
template <typename R>
__device__ int end_pair(const ReceivedRoutes& routes, const Round& round, int source) {
  if constexpr (!R::kEnabled) return routes.first_pair[source + 1];
  return routes.chunk_pair[source * (routes.num_chunks + 1) + round.end / kChunk];
}

// The row in the round's windows of a token of this domain, or of the node token of a source of
// another one that this domain knows by a name.
template <typename R>
__device__ int row_in_round(const KernelContext& ctx, const RailRoutes& routes, const Round& round,
                            int source, int name) {
  if (!R::kEnabled || is_local(ctx, source)) return name - round.begin;
  return routes.num_before(source, name) - routes.num_before(source, round.begin) + name % kChunk;
}

// The address on `rank` of the weights of `source`'s assignments.
__device__ inline float* weights_at(const KernelContext& ctx, int rank, int source,
                                    std::uint64_t parity) {
  const Control& layout = ctx.control;
  return reinterpret_cast<float*>(ctx.control_of[rank] + layout.weights()) +
         (parity * layout.num_ranks + source) * layout.assignments();
}

// Where the rows of another rank begin that this one may pull.
template <typename R>
__device__ const char* rows_from(const KernelContext& ctx, int source, std::uint64_t parity) {
  if constexpr (R::kEnabled) {
    const RailRows rows{ctx.dispatch_bytes, ctx.control.num_domains};
    if (!is_local(ctx, source)) {
      return ctx.rows_of[host_of(ctx, source)] + parity * ctx.dispatch_bytes +
             rows.put(ctx.control.domain_of(ctx.rank), ctx.control.domain_of(source));
    }
  }
  return ctx.rows_of[source] + parity * ctx.dispatch_bytes;
}

// Where rank `rank`'s window has the flags for the phases of `source`.
template <typename R>
__device__ std::uint64_t* staged_flags(const KernelContext& ctx, int rank, int source) {
  const Control& layout = ctx.control;
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[rank] + layout.staged()) +
         source * (R::kEnabled ? layout.max_phases() : kPhases);
}

// Puts what is staged of a phase to the rail peers, after the phase before, which another CTA may
// have completed: they count the phases.  That CTA's puts have deadlines, and name who is late.
// Called by one warp, whose lanes share the domains.
template <typename R, typename Job>
__device__ void put_phase(const KernelContext& ctx, const R& rails, const Job& job,
                          const Round& round, int phase, std::uint64_t parity, std::uint64_t calls,
                          std::uint64_t epoch) {
  const int unit = number_of_phase<R>(round, phase);
  const auto is_next = [&] {
    return static_cast<int>(atomicAdd(&ctx.state->put_phases, 0u)) == unit;
  };
  bool goes_on = true;  // lanes may see it differently
  while (goes_on && !is_next()) goes_on = !has_failed(ctx);
  if (!__all_sync(~0u, goes_on)) return;
  const RailRows rows{ctx.dispatch_bytes, ctx.control.num_domains};
  const int start = phase_start<R>(round, phase), end = phase_start<R>(round, phase + 1);
  const int own = ctx.control.domain_of(ctx.rank), last = min(end, job.num_tokens);
  bool are_put = true;
  for (int domain = threadIdx.x % kWarpSize; domain < ctx.control.num_domains && are_put;
       domain += kWarpSize) {
    if (domain == own) continue;
    if (job.has_weights && last > start) {
      const float* weights = weights_at(ctx, ctx.rank, ctx.rank, calls % 2) + start * job.top_k;
      const std::size_t at = reinterpret_cast<const char*>(weights) - ctx.control_of[ctx.rank];
      const std::size_t num_bytes = sizeof(float) * (last - start) * job.top_k;
      are_put = put(ctx, rails, Phase::kDispatch, epoch, kControlWindow, domain, at, at, num_bytes);
    }
    const int first = job.rail_routes.num_sent(domain, start);
    const std::size_t num_rows = job.rail_routes.num_sent(domain, end) - first;
    const std::size_t at =
        parity * ctx.dispatch_bytes +
        std::size_t{1} * job.row_bytes * (first - job.rail_routes.num_sent(domain, round.begin));
    are_put = are_put && put(ctx, rails, Phase::kDispatch, epoch, kRowsWindow, domain,
                             at + rows.put(domain, own), at + rows.sent(own, domain),
                             num_rows * job.row_bytes, kRowsPut);
  }
  if (!__all_sync(~0u, are_put) || threadIdx.x % kWarpSize != 0) return;
  const int all = num_rounds_of(job) * round.num_phases;
  atomicExch(&ctx.state->put_phases, unit + 1 < all ? unit + 1 : 0u);
}

// Signals each phase that the rail peers have put to the ranks of this domain, as if its source had
// staged it.  Called by one warp.
template <typename R, typename Job>
__device__ void pass_phases_on(const KernelContext& ctx, const R& rails, const Job& job,
                               std::uint64_t epoch) {
  Deadline deadline;
  const auto arrived = [&](int domain, int unit) {
    return has_counted(ctx, rails, kRowsPut, domain, signals_up_to(ctx, kRowsPut, unit + 1));
  };
  const auto pass_on = [&](int domain, int unit) {
    fence_system();
    for (int local_rank = 0; local_rank < ctx.control.local_ranks(); ++local_rank) {
      store_relaxed(
          staged_flags<R>(ctx, rank_at(ctx, local_rank), rail_peer_in(ctx, domain)) + unit, epoch);
    }
    deadline = {};
  };
  for_units(ctx, num_rounds_of(job) * num_phases_in(job), arrived, pass_on, [&](int domain) {
    return deadline.has_passed(ctx, Phase::kDispatch, rail_peer_in(ctx, domain), epoch);
  });
}

// Waits until the half of the windows that a round is staged in is free, which is that of the last
// round but one: of this call, or of the one before, which ranks that are in this one have left.
// Called by all threads of a CTA; false when the group has failed.
template <typename R>
__device__ bool wait_for_half(const KernelContext& ctx, const R& rails, const Round& round,
                              std::uint64_t entry, std::uint64_t epoch) {
  bool is_free = true;
  if (round.number == 1) {
    for (int rank = threadIdx.x; rank < ctx.control.num_ranks && is_free; rank += blockDim.x) {
      is_free = wait_for_entry(ctx, Phase::kDispatch, rank, entry, epoch) != 0;
    }
  } else if (round.number > 1) {
    if (threadIdx.x < ctx.control.local_ranks()) {
      is_free =
          wait_for_round(ctx, Phase::kDispatch, rank_at(ctx, threadIdx.x), round.number - 2, epoch);
    }
    if (has_rail_peer(ctx, threadIdx.x)) {
      is_free = wait_for_signal(ctx, rails, Phase::kDispatch, kPulledPut, threadIdx.x,
                                round.number - 1, epoch) &&
                is_free;
    }
  }
  is_free = __syncthreads_and(is_free);
  fence_for_bulk_copies();
  return is_free;
}

// Tells the rail peers which rounds this domain has pulled, of all but the last, and waits until
// they have told of as many.  Called by one warp.
template <typename R, typename Job>
__device__ void pass_rounds_on(const KernelContext& ctx, const R& rails, const Job& job,
                               std::uint64_t epoch) {
  const int lane = threadIdx.x % kWarpSize, last = num_rounds_of(job) - 1;
  for (int number = 0; number < last; ++number) {
    bool is_over = true;
    for (int group = 0; group < kRankGroups; ++group) {
      const int local_rank = group * kWarpSize + lane;
      is_over = is_over &&
                (local_rank >= ctx.control.local_ranks() ||
                 wait_for_round(ctx, Phase::kDispatch, rank_at(ctx, local_rank), number, epoch));
    }
    if (!__all_sync(~0u, is_over)) return;
    for (int domain = lane; domain < ctx.control.num_domains && is_over; domain += kWarpSize) {
      if (!has_rail_peer(ctx, domain)) continue;
      is_over =
          put(ctx, rails, Phase::kDispatch, epoch, kControlWindow, domain, 0, 0, 0, kPulledPut);
    }
    if (!__all_sync(~0u, is_over)) return;
  }
  for (int domain = lane; domain < ctx.control.num_domains && last > 0; domain += kWarpSize) {
    if (!has_rail_peer(ctx, domain)) continue;
    if (!wait_for_signal(ctx, rails, Phase::kDispatch, kPulledPut, domain, last, epoch)) return;
  }
}

}  // namespace ncclep::native
