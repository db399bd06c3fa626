// The second kernel of plan: copies the routes that the sources wrote for this rank (plan.cu) into
// the plan's memory.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/cuda.h"
#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/plan/chunks.cuh"
#include "native/plan/plan.h"

namespace ncclep::native {

namespace {

// One source's range of a plan's pairs and assignments.
struct Part {
  int first_pair, end_pair, first_assignment, end_assignment;
};

// Copies what `source` wrote for this rank.  Called by `threads` threads, of which this is
// `thread`.
__device__ void fetch(const KernelContext& ctx, const ReceivedRoutes& routes,
                      const RailRoutes& rails, const Part& part, int source, const int* start,
                      int thread, int threads) {
  const Control& layout = ctx.control;
  // A source of another domain has put them into its rail peer's window.
  const bool is_local = native::is_local(ctx, source), is_mine = host_of(ctx, source) == ctx.rank;
  const int domain = layout.domain_of(source);
  const char* window = ctx.control_of[host_of(ctx, source)];
  const RailLayout put{layout};
  const std::size_t row =
      is_local ? ctx.rank : domain * layout.local_ranks() + layout.local_rank_of(ctx.rank);
  const int first_pair = part.first_pair, num_pairs = part.end_pair - first_pair;
  const int first_assignment = part.first_assignment,
            num_assignments = part.end_assignment - first_assignment;
  const int num_chunks = routes.num_chunks + 1;
  const auto* assignments =
      reinterpret_cast<const uint2*>(
          window + (is_local ? layout.assignment_routes() : put.assignment_routes())) +
      row * layout.assignments();
  const auto* pairs = reinterpret_cast<const uint2*>(
                          window + (is_local ? layout.pair_routes() : put.pair_routes())) +
                      row * layout.max_tokens;
  const auto* chunk_pairs = reinterpret_cast<const std::int32_t*>(
                                window + (is_local ? layout.chunk_pairs() : put.chunk_pairs())) +
                            row * (layout.max_chunks() + 1);
  // All loads of a thread's turn are in flight at once; usually one turn is enough.
  constexpr int kAssignments = 8, kPairs = 4;
  for (int turn = 0; turn * kAssignments * threads < num_assignments ||
                     turn * kPairs * threads < num_pairs || turn * threads < num_chunks;
       ++turn) {
    uint2 assignment[kAssignments], pair[kPairs];
    int chunk_pair = 0;
#pragma unroll
    for (int u = 0; u < kAssignments; ++u) {
      const int i = (turn * kAssignments + u) * threads + thread;
      if (i < num_assignments) assignment[u] = __ldcv(assignments + i);
    }
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      const int i = (turn * kPairs + u) * threads + thread;
      if (i < num_pairs) pair[u] = __ldcv(pairs + i);
    }
    const int chunk = turn * threads + thread;
    if (chunk < num_chunks) chunk_pair = __ldcv(chunk_pairs + chunk);
#pragma unroll
    for (int u = 0; u < kAssignments; ++u) {
      const int i = (turn * kAssignments + u) * threads + thread;
      if (i >= num_assignments) break;
      routes.assignment_slot[first_assignment + i] =
          start[assignment[u].x >> 16] + (assignment[u].x & 0xffffu);
      routes.assignment_index[first_assignment + i] = assignment[u].y;
    }
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      const int i = (turn * kPairs + u) * threads + thread;
      if (i >= num_pairs) break;
      routes.pair_token[first_pair + i] = pair[u].x;
      routes.pair_first[first_pair + i] = first_assignment + pair[u].y;
      if (is_mine && !is_local) {
        rails.own_pair[std::int64_t{domain} * rails.most_tokens + pair[u].x] = first_pair + i;
      }
    }
    if (chunk < num_chunks)
      routes.chunk_pair[source * num_chunks + chunk] = first_pair + chunk_pair;
  }
  if (is_local) return;
  const auto* nodes = reinterpret_cast<const std::uint32_t*>(window + put.nodes(domain));
  for (int i = thread; i < num_chunks; i += threads) {
    rails.before[source * num_chunks + i] = static_cast<std::int32_t>(__ldcv(nodes + i));
  }
  if (!is_mine) return;
  const int words = rails.most_tokens * kRankGroups;
  for (int i = thread; i < words; i += threads) {
    rails.ranks_of[std::int64_t{domain} * words + i] = __ldcv(nodes + num_chunks + i);
  }
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    receive_kernel(KernelContext ctx, ReceivedRoutes routes, PlanScratch scratch,
                   RailRoutes rails) {
  __shared__ int start[kMaxLocalExperts];
  const Control& layout = ctx.control;
  const int num_ranks = layout.num_ranks, num_local = layout.num_local();
  const int num_ctas = gridDim.x;
  // After a failure, scratch may hold another plan's contents.  A CTA that starts only after the
  // failure still calls `leave`, because other CTAs of its grid have begun.
  if (had_failed(ctx)) {
    leave(ctx);
    return;
  }
  // A receive without enough room does not count as an operation of the group: other ranks may have
  // enough.
  if (*scratch.is_refused || scratch.first_pair[num_ranks] > routes.max_pairs ||
      scratch.first_assignment[num_ranks] > routes.max_assignments) {
    return;
  }
  const std::uint64_t epoch = current_epoch(ctx);
  const std::uint64_t plans = *static_cast<volatile std::uint64_t*>(&ctx.state->plans);
  // Every source has its own CTAs or, if there are fewer CTAs than sources, every CTA its own
  // sources; each rank starts with a different source.
  for (int i = blockIdx.x % num_ranks; i < num_ranks; i += num_ctas) {
    const int source = (ctx.rank + i) % num_ranks;
    const int ctas = i < num_ctas ? (num_ctas - 1 - i) / num_ranks + 1 : 1;
    for (int local = threadIdx.x; local < num_local; local += kPlanThreads) {
      start[local] = scratch.start[source * num_local + local];
    }
    const Part part{scratch.first_pair[source], scratch.first_pair[source + 1],
                    scratch.first_assignment[source], scratch.first_assignment[source + 1]};
    bool arrived = true;
    if (threadIdx.x == 0) {
      arrived = wait_for_goal(ctx, Phase::kRoutes, source, epoch,
                              signal_word(ctx.control_of[ctx.rank], layout, kRoutesWritten, source),
                              plans) &&
                !has_failed(ctx);
    }
    if (!__syncthreads_and(arrived)) break;
    fetch(ctx, routes, rails, part, source, start,
          static_cast<int>(blockIdx.x) / num_ranks * kPlanThreads + threadIdx.x,
          ctas * kPlanThreads);
    __syncthreads();
  }
  if (blockIdx.x == 0 && !has_failed(ctx)) {
    for (int source = threadIdx.x; source <= num_ranks; source += kPlanThreads) {
      routes.first_pair[source] = scratch.first_pair[source];
    }
    if (threadIdx.x == 0) {
      routes.pair_first[scratch.first_pair[num_ranks]] = scratch.first_assignment[num_ranks];
    }
  }
  if (leave(ctx)) {
    if (threadIdx.x < layout.local_ranks() && !has_failed(ctx)) {
      char* control = ctx.control_of[rank_at(ctx, threadIdx.x)];
      store_release(signal_word(control, layout, kReceived, ctx.rank), plans);
    }
    if (threadIdx.x == 0) {
      ctx.state->received = plans;
      ctx.state->epoch = epoch;
    }
  }
}

}  // namespace

template <>
void plan_receive(const KernelContext& ctx, const ReceivedRoutes& routes,
                  const PlanScratch& scratch, int num_sms, std::uintptr_t stream,
                  const RailRoutes& rail_routes) {
  receive_kernel<<<num_sms, kPlanThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      ctx, routes, scratch, rail_routes);
  cuda_check(cudaGetLastError(), "launching the second part of plan");
}

}  // namespace ncclep::native
