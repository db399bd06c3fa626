// A worked example: R = 2, E = 4 (rank 0 has experts 0 and 1), K = 2.
//
//     rank 0: token 0 -> experts 0, 1      rank 1: token 0 -> experts 2, 1
//             token 1 -> experts 3, 0
//
//     rank 0 tells rank 0: assignments 2 1, pairs 2      tells rank 1: assignments 0 1, pairs 1
//     rank 1 tells rank 0: assignments 0 1, pairs 1      tells rank 1: assignments 1 0, pairs 1
//     rank 0's assignments for rank 0: (expert 0, index 0), (expert 1, index 0) of token 0,
//                                (expert 0, index 1) of token 1; rank 1's: (expert 1, index 0)
//     rows on rank 0: expert 0 from slot 0 (2 rows), expert 1 from slot 2 (2 rows), where rank 0's
//     row comes first; so rank 0's assignments have slots 0 2 1, and rank 1's assignment has slot 3
//
// Why no rank overwrites data that another still reads.  Operations of a rank run one after the
// other, and data written in plan n is read in plan n only.
// - Routes are in their writer's window, where the others' `receive` reads them.  At its end a rank
//   signals kReceived to all, and no rank writes routes before all have received the previous ones:
//   those of the last plan that this rank received itself, since whether a plan is received at all
//   (it is not when the host finds a routing bad) is the same on all ranks.
// - Counts are posted to their reader, who reads them in `count` only.  A rank leaves `count` of
//   plan n + 1 after the counts of n + 1 from all ranks have arrived, and so after all have left
//   `count` of n.  Hence in plan n + 2 no rank still reads the counts of n, and two buffers are
//   enough.  One is enough for what `drop` posts: a rank that posts counts of n has left `drop` of
//   n.
// - A rank whose wait failed does not post kRoutesWritten: the routes in its window are stale.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.h"
#include "native/device/call_barrier.cuh"
#include "native/device/wait.cuh"
#include "native/plan/chunks.cuh"
#include "native/plan/plan.h"
#include "native/plan/plan_rails.cuh"
#include "native/plan/plan_shared.cuh"

namespace ncclep::native {

namespace {

// A number of pairs has, with several domains, the number of the source's chunks of tokens above
// it, and a flag for a bad routing.
constexpr std::uint32_t kBadBit = 1u << 31;
constexpr int kPairBits = 20;
static_assert(kMaxTokens < 1 << kPairBits && kMaxTokens / 128 < 1 << (31 - kPairBits));

static_assert(kMaxTokens <= 1 << 16, "a token_in_chunk has 16 bits");

__device__ std::uint64_t* count_word(char* control, const Control& layout, std::uint64_t plans,
                                     int source, int column) {
  return reinterpret_cast<std::uint64_t*>(control + layout.counts()) +
         (plans % 2 * layout.num_ranks + source) * (layout.num_local() + 1) + column;
}

// Posts to every rank how much it will receive from this one.  False when the group has failed.
template <typename R>
__device__ bool post_counts(const KernelContext& ctx, const R& rails, const PlanScratch& scratch,
                            const int* total, int num_chunks, bool is_bad, std::uint64_t plans,
                            std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const int num_experts = layout.num_experts, num_local = layout.num_local();
  for (int i = threadIdx.x; i < num_experts + layout.num_ranks; i += kPlanThreads) {
    const bool is_pairs = i >= num_experts;
    const int rank = is_pairs ? i - num_experts : i / num_local;
    const int column = is_pairs ? num_local : i % num_local;
    std::uint32_t value = total[i] | (is_pairs && is_bad ? kBadBit : 0);
    if constexpr (R::kEnabled) {
      if (is_pairs) value |= static_cast<std::uint32_t>(num_chunks) << kPairBits;
      if (!is_local(ctx, rank)) {
        *sent_count(ctx, layout.domain_of(rank),
                    layout.local_rank_of(rank) * (num_local + 1) + column) = value;
        continue;
      }
    }
    post_numbered(count_word(ctx.control_of[rank], layout, plans, ctx.rank, column), plans, value);
  }
  if constexpr (R::kEnabled) {
    const int columns = num_experts + layout.num_ranks + layout.num_domains;
    for (int i = threadIdx.x; i < columns; i += kPlanThreads) __stcg(scratch.totals + i, total[i]);
    return exchange_counts(
        ctx, rails, epoch, [&](int rank, int source, int column, std::uint32_t value) {
          post_numbered(count_word(ctx.control_of[rank], layout, plans, source, column), plans,
                        value);
        });
  }
  return true;
}

// Reads what this rank receives from all ranks, and writes it to the host's mailbox, the plan's
// tensors and scratch.  With several domains there are many ranks with few experts each.
template <typename R>
__device__ void receive_counts(const KernelContext& ctx, const PlanCount& plan,
                               const PlanScratch& scratch, Shared& shared, std::uint64_t plans,
                               std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const int num_ranks = layout.num_ranks, num_local = layout.num_local(), columns = num_local + 1;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x < kRankWords) shared.bad_ranks[threadIdx.x] = 0;
  if (R::kEnabled && threadIdx.x == 0) *shared.most_chunks = 0;
  __syncthreads();
  bool is_complete = true;
  for (int i = threadIdx.x; i < num_ranks * columns; i += kPlanThreads) {
    const int source = i / columns;
    const std::int64_t value = wait_for_numbered(
        ctx, Phase::kPlan, source, epoch,
        count_word(ctx.control_of[ctx.rank], layout, plans, source, i % columns), plans);
    is_complete = is_complete && value >= 0;
    shared.arrived[i] = static_cast<int>(value & ~kBadBit);
    if constexpr (R::kEnabled) {
      if (i % columns == num_local) {
        atomicMax(shared.most_chunks, shared.arrived[i] >> kPairBits);
        shared.arrived[i] &= (1 << kPairBits) - 1;
      }
    }
    if (value >= 0 && (value & kBadBit)) {
      atomicOr(shared.bad_ranks + source / 32, 1u << source % 32);
    }
  }
  if (!__syncthreads_and(is_complete)) return;
  if (R::kEnabled && threadIdx.x == 0) *plan.rail_routes.most_chunks = *shared.most_chunks;
  constexpr int kLanes = R::kEnabled ? kWarpSize : 1;  // that share the sources of an expert
  const int part = threadIdx.x % kLanes;
  for (int local = threadIdx.x / kLanes; local < num_local; local += kPlanThreads / kLanes) {
    int assignments = 0;
    for (int source = part; source < num_ranks; source += kLanes) {
      assignments += shared.arrived[source * columns + local];
    }
    if (R::kEnabled) assignments = warp_sum(assignments);
    if (part != 0) continue;
    const int rows = (assignments + plan.alignment - 1) / plan.alignment * plan.alignment;
    plan.tokens_per_expert[local] = shared.block_rows[local] = rows;
    if (plan.ticket != 0) {
      ctx.mailbox->rows_of_expert[local] =
          static_cast<std::uint64_t>(plan.ticket) << 32 | static_cast<std::uint32_t>(rows);
    }
    plan.routed_per_expert[local] = shared.block_assignments[local] = assignments;
  }
  __syncthreads();
  if (warp == 0) {
    const std::uint32_t bad = lane < kRankWords ? shared.bad_ranks[lane] : 0;
    const int word = __ffs(__ballot_sync(~0u, bad != 0)) - 1;  // the first that is not 0
    const int first_bad =
        word < 0 ? 0 : 32 * word + __ffs(__shfl_sync(~0u, bad, max(word, 0)));  // 1 + the rank
    if (lane == 0) *scratch.is_refused = !plan.is_static && first_bad != 0;
    int rows = 0, assignments = 0;
    for (int local = lane; local < num_local; local += kWarpSize) {
      rows += shared.block_rows[local];
      assignments += shared.block_assignments[local];
    }
    rows = warp_sum(rows);
    assignments = warp_sum(assignments);
    const int all_pairs = prefix_sum(num_ranks, scratch.first_pair, [&](int source) {
      return shared.arrived[source * columns + num_local];
    });
    const std::uint32_t sizes[4] = {
        static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(all_pairs),
        static_cast<std::uint32_t>(assignments), static_cast<std::uint32_t>(first_bad)};
    if (plan.ticket == 0) {
      // Collects all plans since the host last read it; no other thread of the device writes it.
      if (bad != 0) ctx.mailbox->bad_ranks.words[lane] |= bad;
    } else if (lane == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ctx.mailbox->sizes[i] = static_cast<std::uint64_t>(plan.ticket) << 32 | sizes[i];
      }
    }
    if (lane == 0) *plan.num_dropped = plan.has_dropped ? *plan.num_dropped - assignments : 0;
  } else if (warp == 1) {
    int end = 0;
    for (int first = 0; first < num_local; first += kWarpSize) {
      const int local = first + lane;
      const int rows = local < num_local ? shared.block_rows[local] : 0;
      const int rows_to_here = warp_scan(rows);
      if (local < num_local) shared.block_start[local] = end + rows_to_here - rows;
      end += __shfl_sync(~0u, rows_to_here, kWarpSize - 1);
    }
  } else if (R::kEnabled) {
    const int first = threadIdx.x - 2 * kWarpSize;
    for (int source = first; source < num_ranks; source += kPlanThreads - 2 * kWarpSize) {
      int assignments = 0;
      for (int local = 0; local < num_local; ++local) {
        assignments += shared.arrived[source * columns + local];
      }
      shared.assignments_of[source] = assignments;
    }
  } else {
    for (int source = warp - 2; source < num_ranks; source += kPlanWarps - 2) {
      int assignments = 0;
      for (int local = lane; local < num_local; local += kWarpSize) {
        assignments += shared.arrived[source * columns + local];
      }
      assignments = warp_sum(assignments);
      if (lane == 0) shared.assignments_of[source] = assignments;
    }
  }
  __syncthreads();
  for (int local = threadIdx.x / kLanes; local < num_local; local += kPlanThreads / kLanes) {
    int slot = shared.block_start[local];
    for (int source = part; source - part < num_ranks; source += kLanes) {
      const int own = source < num_ranks ? shared.arrived[source * columns + local] : 0;
      const int up_to = R::kEnabled ? warp_scan(own) : own;
      if (source < num_ranks) scratch.start[source * num_local + local] = slot + up_to - own;
      slot += R::kEnabled ? __shfl_sync(~0u, up_to, kLanes - 1) : up_to;
    }
  }
  if (warp == 0) {
    prefix_sum(num_ranks, scratch.first_assignment,
               [&](int source) { return shared.assignments_of[source]; });
  }
}

// This rank's assignments for `rank` before this token of a chunk.
template <typename R>
__device__ int assignments_before(const TokenPartition& partition, const ChunkTile& tile, int chunk,
                                  int rank, int token_in_chunk) {
  const int group = chunk * partition.num_ranks + rank, num_local = partition.num_local();
  int sum = tile.of_rank[group];
  if constexpr (!R::kEnabled) return sum + tile.of_token[group * kChunk + token_in_chunk];
  const ulonglong2* bitmaps = tile.bitmaps + chunk * partition.num_columns() + rank * num_local;
  for (int local = 0; local < num_local; ++local)
    sum += count_before(bitmaps[local], token_in_chunk);
  return sum;
}

// Writes the routes of this CTA's tokens for the other ranks to fetch.
template <typename Index, typename R>
__device__ void write_routes(const KernelContext& ctx, const PlanCount& plan,
                             const TokenPartition& partition, const ChunkTile& tile, int* start) {
  const Control& layout = ctx.control;
  const int columns = partition.num_columns(), num_experts = partition.num_experts,
            top_k = partition.top_k;
  const int num_ranks = partition.num_ranks, num_local = partition.num_local();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  char* window = ctx.control_of[ctx.rank];
  auto* pair_routes = reinterpret_cast<PairRoute*>(window + layout.pair_routes());
  auto* assignment_routes = reinterpret_cast<AssignmentRoute*>(window + layout.assignment_routes());
  auto* chunk_pairs = reinterpret_cast<std::int32_t*>(window + layout.chunk_pairs());
  const auto ignore = [](int, RankSet, std::uint32_t) {};
  visit_chunks<Index>(partition, tile, plan.topk_idx, start, ignore, [&](int first, int chunks) {
    for (int i = warp; i < chunks * num_ranks; i += kPlanWarps) {
      const int chunk = i / num_ranks, rank = i % num_ranks;
      const int* before = tile.before + chunk * columns;
      int assignments = 0;
      for (int local = lane; local < num_local; local += kWarpSize) {
        assignments += before[rank * num_local + local];
      }
      assignments = warp_sum(assignments);
      if (lane == 0) {
        tile.of_rank[i] = assignments;
        chunk_pairs[rank * (layout.max_chunks() + 1) + first + chunk] = before[num_experts + rank];
      }
      if constexpr (!R::kEnabled) scan_tokens(tile.of_token + i * kChunk);
    }
    if constexpr (R::kEnabled) {
      for (int i = threadIdx.x; i < chunks * layout.num_domains; i += kPlanThreads) {
        const int chunk = i / layout.num_domains, domain = i % layout.num_domains;
        write_num_nodes(ctx, plan, domain, first + chunk,
                        tile.before[chunk * columns + partition.column_of_domain(domain)]);
      }
    }
    __syncthreads();
    const int tokens = min(partition.num_tokens - first * kChunk, chunks * kChunk);
    for (int i = threadIdx.x; i < tokens * top_k; i += kPlanThreads) {
      const int expert = tile.assignments[i];
      if (expert < 0) continue;
      const int token = i / top_k, chunk = token / kChunk, token_in_chunk = token % kChunk;
      const int rank = expert / num_local, first_expert = rank * num_local;
      // Counts the token's assignments for lower experts of the same rank.
      int turn = 0;
      for (int k = 0; k < top_k; ++k) {
        const int other = tile.assignments[token * top_k + k];
        turn += other >= first_expert && other < expert;
      }
      const int* before = tile.before + chunk * columns;
      const ulonglong2* bitmaps = tile.bitmaps + chunk * columns;
      const int first_assignment =
          assignments_before<R>(partition, tile, chunk, rank, token_in_chunk);
      const std::uint32_t in_expert =
          before[expert] + count_before(bitmaps[expert], token_in_chunk);
      assignment_routes[rank * layout.assignments() + first_assignment + turn] = {
          static_cast<std::uint32_t>(expert - first_expert) << 16 | in_expert,
          first * kChunk * top_k + i};
      if (turn != 0) continue;
      const int column = num_experts + rank;
      const int pair = before[column] + count_before(bitmaps[column], token_in_chunk);
      int name = first * kChunk + token;
      if constexpr (R::kEnabled) {
        const int domain = partition.column_of_domain(layout.domain_of(rank));
        if (!is_local(ctx, rank))
          name += count_before(bitmaps[domain], token_in_chunk) - token_in_chunk;
      }
      pair_routes[static_cast<std::size_t>(rank) * layout.max_tokens + pair] = {name,
                                                                                first_assignment};
    }
    const int own_start = ctx.rank * num_local;
    for (int token = threadIdx.x; token < tokens; token += kPlanThreads) {
      const int token_in_chunk = token % kChunk;
      std::uint32_t own_assignments = 0;
      for (int k = 0; k < top_k; ++k) {
        const int expert = tile.assignments[token * top_k + k];
        if (expert >= own_start && expert < own_start + num_local) own_assignments |= 1u << k;
      }
      plan.token_routes.own_assignments[first * kChunk + token] = own_assignments;
      plan.token_routes.own_first[first * kChunk + token] =
          assignments_before<R>(partition, tile, token / kChunk, ctx.rank, token_in_chunk);
      if constexpr (R::kEnabled) {
        const int chunk = token / kChunk * columns;
        write_node_tokens(ctx, plan, partition, tile.bitmaps + chunk, tile.before + chunk,
                          first * kChunk + token, tile.assignments + token * top_k);
      }
    }
  });
}

// The pairs of a rank, and the node tokens, before chunks that no token begins.
template <typename R>
__device__ void write_ends(const KernelContext& ctx, const PlanCount& plan,
                           const TokenPartition& partition, const int* total) {
  const Control& layout = ctx.control;
  auto* chunk_pairs =
      reinterpret_cast<std::int32_t*>(ctx.control_of[ctx.rank] + layout.chunk_pairs());
  for (int i = threadIdx.x; i < layout.num_ranks * (plan.most_chunks + 1); i += kPlanThreads) {
    const int rank = i % layout.num_ranks, chunk = i / layout.num_ranks;
    const int tokens = partition.num_tokens;
    if (chunk < (tokens + kChunk - 1) / kChunk) continue;
    chunk_pairs[rank * (layout.max_chunks() + 1) + chunk] = total[layout.num_experts + rank];
    if constexpr (R::kEnabled) {
      if (rank >= layout.num_domains) continue;
      write_num_nodes(ctx, plan, rank, chunk, total[partition.column_of_domain(rank)]);
    }
  }
}

// All threads call this last.
template <typename R>
__device__ void finish(const KernelContext& ctx, const R& rails, const PlanCount& plan,
                       const PlanScratch& scratch, std::uint64_t plans, std::uint64_t entry,
                       std::uint64_t epoch) {
  if (!leave(ctx)) return;
  const Control& layout = ctx.control;
  if (threadIdx.x < layout.local_ranks() && !has_failed(ctx)) {
    char* control = ctx.control_of[rank_at(ctx, threadIdx.x)];
    store_release(signal_word(control, layout, kRoutesWritten, ctx.rank), plans);
  }
  if constexpr (R::kEnabled) {
    if (!had_failed(ctx)) exchange_routes(ctx, rails, plan, scratch, plans, epoch);
  }
  if (has_failed(ctx)) {
    // No rank gets rows; dispatch and combine with this plan produce NaN.
    for (int local = threadIdx.x; local < layout.num_local(); local += kPlanThreads) {
      plan.tokens_per_expert[local] = plan.routed_per_expert[local] = 0;
    }
    if (threadIdx.x == 0) *plan.num_dropped = 0;
  }
  if (threadIdx.x == 0) {
    ctx.state->is_bad = 0;
    ctx.state->plans = plans;
    if (ctx.call != 0) leave_call<R>(ctx, entry);
    count_signals<R>(ctx, kCountsPut, 1);
    count_signals<R>(ctx, kRoutesPut, 1);
    ctx.state->epoch = epoch;
  }
}

template <typename Index, typename R>
__global__ void __launch_bounds__(kPlanThreads, 1)
    count_kernel(KernelContext ctx, PlanCount plan, PlanScratch scratch, TokenPartition partition,
                 const __grid_constant__ R rails) {
  extern __shared__ __align__(16) char memory[];
  const Control& layout = ctx.control;
  const ChunkTile tile(partition, memory);
  Shared shared(partition, memory + partition.tile_bytes());
  const std::uint64_t epoch = current_epoch(ctx), entry = current_entry(ctx);
  const std::uint64_t plans = *static_cast<volatile std::uint64_t*>(&ctx.state->plans) + 1;

  if (had_failed(ctx)) {
    finish(ctx, rails, plan, scratch, plans, entry, epoch);
    return;
  }
  if (blockIdx.x == 0 && ctx.call != 0) enter(ctx, rails, Phase::kPlan, entry, epoch);
  count_part<Index>(partition, tile, plan.topk_idx, shared.total, scratch.parts,
                    [&](int token, RankSet ranks, std::uint32_t assignments) {
                      rank_sets(plan.token_routes.token_ranks)[token] = ranks;
                      plan.token_routes.token_assignments[token] = assignments;
                    });
  if (!grid_barrier(ctx, Phase::kPlan)) {
    finish(ctx, rails, plan, scratch, plans, entry, epoch);
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x < kWarpSize && ctx.call != 0) {
    compare_entries(ctx, rails, Phase::kPlan, entry, epoch);
  }
  // The CTA with the fewest tokens, possibly none, communicates with the other ranks.
  const bool is_leader = blockIdx.x == gridDim.x - 1;
  const int before = min(static_cast<int>(blockIdx.x), partition.num_parts());
  sum_parts(partition, scratch.parts, is_leader ? partition.num_parts() : before, shared.start,
            shared.total);
  if (is_leader) {
    const bool was_bad = *static_cast<volatile unsigned int*>(&ctx.state->is_bad) != 0;
    const bool is_bad = was_bad || shared.total[partition.num_columns()] != 0;
    if (post_counts(ctx, rails, scratch, shared.total, partition.num_chunks(), is_bad, plans,
                    epoch)) {
      receive_counts<R>(ctx, plan, scratch, shared, plans, epoch);
    }
  }
  bool is_free = true;
  for (int rank = threadIdx.x; rank < layout.num_ranks && is_free; rank += kPlanThreads) {
    if (R::kEnabled && !is_local(ctx, rank)) {
      // Whose counts of this plan are here has received the routes of the last one.
      const std::uint64_t* word =
          count_word(ctx.control_of[ctx.rank], layout, plans, rank, layout.num_local());
      is_free = wait_for_numbered(ctx, Phase::kRoutes, rank, epoch, word, plans) >= 0;
    } else {
      is_free = wait_for_goal(ctx, Phase::kRoutes, rank, epoch,
                              signal_word(ctx.control_of[ctx.rank], layout, kReceived, rank),
                              *static_cast<volatile std::uint64_t*>(&ctx.state->received));
    }
  }
  if (__syncthreads_and(is_free)) {
    if (is_leader) write_ends<R>(ctx, plan, partition, shared.total);
    write_routes<Index, R>(ctx, plan, partition, tile, shared.start);
  }
  finish(ctx, rails, plan, scratch, plans, entry, epoch);
}

}  // namespace

template <>
std::size_t plan_shared_bytes<kRankGroups>() {
  return shared_bytes_of("plan", count_kernel<std::int64_t, NoRails>,
                         kMaxHeldBytes + kMaxOtherBytes);
}

template <>
void plan_count(const KernelContext& ctx, const PlanCount& arguments, const PlanScratch& scratch,
                int num_sms, std::uintptr_t stream, const Rails* rails) {
  const int num_tokens = arguments.num_tokens;
  require(num_tokens <= kMaxTokens, num_tokens, " tokens: at most ", kMaxTokens);
  const TokenPartition partition = partition_tokens(num_tokens, arguments.top_k, ctx, num_sms);
  with_rails(rails, [&](const auto& way) {
    using R = std::decay_t<decltype(way)>;
    const auto kernel =
        arguments.is_int64 ? count_kernel<std::int64_t, R> : count_kernel<std::int32_t, R>;
    launch_cooperatively("plan", kernel, partition.num_ctas, kPlanThreads,
                         partition.tile_bytes() + Shared::num_bytes(partition), stream, ctx,
                         arguments, scratch, partition, way);
  });
}

}  // namespace ncclep::native
