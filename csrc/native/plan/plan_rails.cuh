// What plan's first kernel does for the other NVLink domains (rail_layout.h).
//
// Counts of a domain's ranks go to the rail peer there, who posts them to its ranks as if each were
// this rank's own post.  Routes go to the rail peer, in whose window the ranks there fetch them.
//
// Why nothing is overwritten that is still needed.  A rank leaves `count` only after everything its
// rail peers put to it has arrived (device/rails.cuh).
// - Counts: a rail peer puts its routes after it has taken all counts, and a rank leaves `count`
//   after those routes have come.
// - Routes: they are written in the next plan after its counts have come from the rail peer, who
//   has then left `count` of this one; and put after the counts of all ranks have come, who have
//   then received the last ones.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/rails.cuh"
#include "native/plan/chunks.cuh"
#include "native/plan/plan.h"

namespace ncclep::native {

// The `i`-th count for `domain` on its way (rail_layout.h).
__device__ inline std::uint64_t* sent_count(const KernelContext& ctx, int domain, int i) {
  const RailLayout rails{ctx.control};
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[ctx.rank] + rails.sent_counts()) +
         domain * rails.num_counts() + i;
}

// The node tokens for `domain` before a chunk of this rank's tokens.
__device__ inline void write_num_nodes(const KernelContext& ctx, const PlanCount& plan, int domain,
                                       int chunk, int number) {
  const RailLayout there{ctx.control};
  plan.rail_routes.sent_before[domain * (plan.most_chunks + 1) + chunk] = number;
  reinterpret_cast<std::int32_t*>(ctx.control_of[ctx.rank] + there.sent_nodes(domain))[chunk] =
      number;
}

// A token of this rank, in a chunk with these bitmaps: writes where the other domains have it.
__device__ inline void write_node_tokens(const KernelContext& ctx, const PlanCount& plan,
                                         const TokenPartition& partition, const ulonglong2* bitmaps,
                                         const int* before, int token,
                                         const std::int16_t* experts) {
  const Control& layout = ctx.control;
  const RailLayout there{layout};
  const RailRoutes& routes = plan.rail_routes;
  const int num_local = layout.num_local();
  for (int domain = 0; domain < layout.num_domains; ++domain) {
    if (domain == layout.domain_of(ctx.rank)) continue;
    RankSet ranks{};
    std::uint32_t assignments = 0;
    for (int k = 0; k < partition.top_k; ++k) {
      if (experts[k] < 0 || layout.domain_of(experts[k] / num_local) != domain) continue;
      ranks |= one_rank(layout.local_rank_of(experts[k] / num_local));
      assignments |= 1u << k;
    }
    const std::int64_t row = std::int64_t{domain} * routes.num_tokens;
    const int column = partition.column_of_domain(domain);
    const int index = count_before(bitmaps[column], token % kChunk);  // in the chunk
    const int node = before[column] + index;
    routes.node_of[row + token] = !ranks ? -1 : node;
    routes.sent_assignments[row + token] = assignments;
    if (!ranks) continue;
    routes.token_of[row + node] = token;
    auto* token_ranks =
        reinterpret_cast<std::uint32_t*>(ctx.control_of[ctx.rank] + there.sent_nodes(domain)) +
        plan.most_chunks + 1;
    rank_sets(token_ranks)[token / kChunk * kChunk + index] = ranks;
  }
}

#ifdef NCCLEP_NCCL_HEADERS

// Puts the counts that were written with `sent_count` to the rail peers, and posts theirs to the
// ranks of this domain.  `post(rank, source, column, value)`.  Called by all threads of one CTA;
// false when the group has failed.
template <typename Post>
__device__ bool exchange_counts(const KernelContext& ctx, const Rails& rails, std::uint64_t epoch,
                                Post&& post) {
  const RailLayout layout{ctx.control};
  const int domain = threadIdx.x, own = ctx.control.domain_of(ctx.rank);
  const int columns = ctx.control.num_local() + 1, num_counts = layout.num_counts();
  const auto row = [&](int of) { return std::size_t{8} * of * num_counts; };
  __syncthreads();
  bool is_put = true;
  if (has_rail_peer(ctx, domain)) {
    is_put =
        put(ctx, rails, Phase::kPlan, epoch, kControlWindow, domain, layout.counts() + row(own),
            layout.sent_counts() + row(domain), num_counts * 8, kCountsPut) &&
        wait_for_signal(ctx, rails, Phase::kPlan, kCountsPut, domain, 1, epoch);
  }
  if (!__syncthreads_and(is_put)) return false;
  const int first = own * layout.local_ranks();
  for (int i = threadIdx.x; i < layout.num_domains() * num_counts; i += kPlanThreads) {
    const int of = i / num_counts, column = i % num_counts;
    if (of == own) continue;
    const std::uint64_t value = __ldcg(reinterpret_cast<const std::uint64_t*>(
        ctx.control_of[ctx.rank] + layout.counts() + row(of) + 8 * column));
    post(first + column / columns, rail_peer_in(ctx, of), column % columns,
         static_cast<std::uint32_t>(value));
  }
  return true;
}

// Puts the routes for all other domains to the rail peers, and tells the ranks of this domain when
// those of the rail peers have come.  Called by all threads of the CTA that leaves last.
__device__ inline void exchange_routes(const KernelContext& ctx, const Rails& rails,
                                       const PlanCount& plan, const PlanScratch& scratch,
                                       std::uint64_t plans, std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const RailLayout there{layout};
  const int domain = threadIdx.x, own = layout.domain_of(ctx.rank), locals = layout.local_ranks();
  const int num_local = layout.num_local(), chunks = layout.max_chunks() + 1;
  if (has_rail_peer(ctx, domain)) {
    // Three parts for each rank there, and the node tokens.  One place in the code
    // puts them: each takes registers.
    bool are_put = true;
    for (int part = 0; part <= 3 * locals && are_put; ++part) {
      const std::size_t rank = domain * locals + part / 3, to = rank_at(ctx, part / 3);
      RailSignal signal = kNumRailSignals;
      std::size_t at, from, num_bytes;
      if (part == 3 * locals) {
        const int names = (plan.num_tokens + kChunk - 1) / kChunk * kChunk;
        at = there.nodes(own);
        from = there.sent_nodes(domain);
        num_bytes = std::size_t{4} * (plan.most_chunks + 1 + names * kRankGroups);
        signal = kRoutesPut;
      } else if (part % 3 == 0) {
        const std::size_t row = layout.assignments() * sizeof(AssignmentRoute);
        at = there.assignment_routes() + to * row;
        from = layout.assignment_routes() + rank * row;
        num_bytes = 0;
        for (int local = 0; local < num_local; ++local) {
          num_bytes += __ldcg(scratch.totals + rank * num_local + local) * sizeof(AssignmentRoute);
        }
      } else if (part % 3 == 1) {
        const std::size_t row = layout.max_tokens * sizeof(PairRoute);
        at = there.pair_routes() + to * row;
        from = layout.pair_routes() + rank * row;
        num_bytes = __ldcg(scratch.totals + layout.num_experts + rank) * sizeof(PairRoute);
      } else {
        at = there.chunk_pairs() + to * chunks * 4;
        from = layout.chunk_pairs() + rank * chunks * 4;
        num_bytes = (plan.most_chunks + 1) * 4;
      }
      are_put = put(ctx, rails, Phase::kRoutes, epoch, kControlWindow, domain, at, from, num_bytes,
                    signal);
    }
    if (are_put && wait_for_signal(ctx, rails, Phase::kRoutes, kRoutesPut, domain, 1, epoch)) {
      fence_system();
      for (int local_rank = 0; local_rank < locals; ++local_rank) {
        store_relaxed(signal_word(ctx.control_of[rank_at(ctx, local_rank)], layout, kRoutesWritten,
                                  rail_peer_in(ctx, domain)),
                      plans);
      }
    }
  }
  __syncthreads();
}

#endif

}  // namespace ncclep::native
