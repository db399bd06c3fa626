// The phases of a dispatch: which tokens they have, and how they get to other NVLink domains.
//
// `Job` is a Dispatch (rows/dispatch.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/plan/plan.h"
#include "native/state.h"

namespace ncclep::native {

// Phases are those of a round.  The first two have half as many tokens as the others.  The bounds
// are the same on all ranks.
template <typename Job>
__device__ int halves_of(const Job& job) {
  return max(1, 2 * (job.num_phases - 1));
}

template <typename Job>
__device__ int part_up_to(const Job& job, int phase, int tokens) {
  const int half = phase < 2 ? phase : 2 * (phase - 1), halves = halves_of(job);
  return (tokens * half + halves - 1) / halves;
}

template <typename Job>
__device__ int phase_start(const Job& job, int phase) {
  return job.begin + part_up_to(job, phase, job.end - job.begin);
}

template <typename Job>
__device__ int phase_of(const Job& job, int token) {
  const int half = (token - job.begin) * halves_of(job) / (job.end - job.begin);
  return half < 2 ? half : half / 2 + 1;
}

// Weights of all tokens go with the first round, because a token may be in a later one than it is
// as node token.
template <typename Job>
__device__ int weights_start(const Job& job, int phase) {
  return job.begin > 0 ? job.num_tokens
                       : min(job.num_tokens, part_up_to(job, phase, job.most_tokens));
}

// The pairs of a source in the round: from the first, up to the end.
template <typename R, typename Job>
__device__ int first_pair(const Job& job, int source) {
  const ReceivedRoutes& routes = job.routes;
  if constexpr (!R::kAreThere) return routes.first_pair[source];
  return routes.chunk_pair[source * (routes.num_chunks + 1) + job.begin / kChunk];
}
template <typename R, typename Job>
__device__ int end_pair(const Job& job, int source) {
  const ReceivedRoutes& routes = job.routes;
  if constexpr (!R::kAreThere) return routes.first_pair[source + 1];
  return routes.chunk_pair[source * (routes.num_chunks + 1) + (job.end + kChunk - 1) / kChunk];
}

// The address on `rank` of the weights of `source`'s assignments.
__device__ inline float* weights_at(const KernelContext& me, int rank, int source,
                                    std::uint64_t parity) {
  const Control& layout = me.control;
  return reinterpret_cast<float*>(me.control_of[rank] + layout.weights()) +
         (parity * layout.num_ranks + source) * layout.assignments();
}

// Where the rows of another rank begin that this one may pull.
template <typename R>
__device__ const char* rows_from(const KernelContext& me, int source, std::uint64_t parity) {
  if constexpr (R::kAreThere) {
    const RailRows rows{me.dispatch_bytes, me.control.num_domains};
    if (!is_local(me, source)) {
      return me.rows_of[host_of(me, source)] + parity * me.dispatch_bytes +
             rows.put(me.control.domain_of(me.rank), me.control.domain_of(source));
    }
  }
  return me.rows_of[source] + parity * me.dispatch_bytes;
}

// Puts what is staged of a phase to the rail peers, after the phase before, which another CTA may
// have completed: they count the phases.  That CTA's puts have deadlines, and name who is late.
// Called by one thread.
template <typename R, typename Job>
__device__ void put_phase(const KernelContext& me, const R& rails, const Job& job, int phase,
                          std::uint64_t parity, std::uint64_t calls, std::uint64_t epoch) {
  const auto is_next = [&] {
    return static_cast<int>(atomicAdd(&me.state->put_phases, 0u)) == phase;
  };
  while (!is_next()) {
    if (has_failed(me)) return;
  }
  const RailRows rows{me.dispatch_bytes, me.control.num_domains};
  const int start = phase_start(job, phase), end = phase_start(job, phase + 1);
  const int own = me.control.domain_of(me.rank);
  for (int domain = 0; domain < me.control.num_domains; ++domain) {
    if (domain == own) continue;
    const int first_token = weights_start(job, phase), last = weights_start(job, phase + 1);
    if (job.has_weights && last > first_token) {
      const float* weights = weights_at(me, me.rank, me.rank, calls % 2) + first_token * job.top_k;
      const std::size_t at = reinterpret_cast<const char*>(weights) - me.control_of[me.rank];
      const std::size_t num_bytes = sizeof(float) * (last - first_token) * job.top_k;
      if (!put(me, rails, Phase::kDispatch, epoch, kControlWindow, domain, at, at, num_bytes))
        return;
    }
    const std::size_t first = std::size_t{1} * (start - job.begin) * job.row_bytes;
    const int num_rows = max(0, min(end, job.rail_routes.num_sent[domain]) - start);
    const std::size_t half = parity * me.dispatch_bytes + first;
    if (!put(me, rails, Phase::kDispatch, epoch, kRowsWindow, domain, half + rows.put(domain, own),
             half + rows.sent(own, domain), std::size_t{1} * num_rows * job.row_bytes, kRowsPut)) {
      return;
    }
  }
  atomicExch(&me.state->put_phases, phase + 1 < job.num_phases ? phase + 1 : 0u);
}

// Signals each phase that the rail peers have put to the ranks of this domain, as if its source had
// staged it.  Called by one warp.
template <typename R, typename Job>
__device__ void pass_phases_on(const KernelContext& me, const R& rails, const Job& job,
                               std::uint64_t epoch) {
  const Control& layout = me.control;
  for (int phase = 0; phase < job.num_phases; ++phase) {
    for (int domain = threadIdx.x % kWarpSize; domain < layout.num_domains; domain += kWarpSize) {
      if (!has_rail_peer(me, domain)) continue;
      if (!wait_for_signal(me, rails, Phase::kDispatch, kRowsPut, domain, phase + 1, epoch)) return;
      fence_system();
      for (int place = 0; place < layout.local_ranks(); ++place) {
        auto* flags = reinterpret_cast<std::uint64_t*>(me.control_of[local_rank(me, place)] +
                                                       layout.staged());
        store_relaxed(flags + rail_peer_in(me, domain) * kPhases + phase, epoch);
      }
    }
  }
}

}  // namespace ncclep::native
