// Every rank tells every other how many assignments it has for each expert.  From that, a rank
// knows which of its own assignments open a new alignment block of `alignment` rows, and how many
// blocks are open at the destination before each chunk of its tokens:
//
//     index of an assignment in its expert's block =
//         assignments of lower ranks + this rank's assignments before it
//     it opens an alignment block if index % alignment == 0
//     blocks open before a chunk = sum over the destination's experts of
//         ceil((lower ranks' assignments + this rank's before it) / alignment)
//
// So only the tokens inside a chunk have to be visited in order, by a scan.  An assignment fits if
// the number of blocks up to and including it is at most max_recv_rows / alignment; that number
// never decreases, so nothing fits after the first assignment that does not.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "native/device/call_barrier.cuh"
#include "native/device/wait.cuh"
#include "native/plan/chunks.cuh"
#include "native/plan/overflow.h"

namespace ncclep::native {

namespace {

constexpr int kOpens = 1 << 14;  // flag on an expert: the assignment opens an alignment block

static_assert(kMaxExperts <= kOpens);

// In shared memory, after the tile.
struct Shared {
  int* start;      // [columns + 1]: before this CTA
  int* total;      // [columns + 1]: of this rank
  int* lower;      // [E]: of lower ranks
  int* requested;  // [E]: of all ranks
  int* blocks;     // [R]: blocks that each rank would need

  __device__ Shared(const TokenPartition& partition, char* memory)
      : start(reinterpret_cast<int*>(memory)),
        total(start + partition.part_size()),
        lower(total + partition.part_size()),
        requested(lower + partition.num_experts),
        blocks(requested + partition.num_experts) {}

  static std::size_t num_bytes(const TokenPartition& partition) {
    return sizeof(int) *
           (2 * partition.part_size() + 2 * partition.num_experts + partition.num_ranks);
  }
};

NCCLEP_BOTH inline int blocks_for(int rows, int alignment) {
  return (rows + alignment - 1) / alignment;
}

__device__ std::uint64_t* request_word(char* control, const Control& layout, int source,
                                       int expert) {
  return reinterpret_cast<std::uint64_t*>(control + layout.requested()) +
         source * layout.num_experts + expert;
}

// Puts this rank's counts to the rail peers, and posts theirs to the ranks of this domain.
template <typename R>
__device__ void forward_requests(const KernelContext& ctx, const R& rails, std::uint64_t plans,
                                 std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const int domain = threadIdx.x, locals = layout.local_ranks(), num_experts = layout.num_experts;
  __syncthreads();
  bool is_put = true;
  if (has_rail_peer(ctx, domain)) {
    const std::size_t row = layout.requested() + std::size_t{8} * ctx.rank * num_experts;
    is_put = put(ctx, rails, Phase::kPlan, epoch, kControlWindow, domain, row, row,
                 std::size_t{8} * num_experts, kRequestsPut) &&
             wait_for_signal(ctx, rails, Phase::kPlan, kRequestsPut, domain, 1, epoch);
  }
  if (!__syncthreads_and(is_put)) return;
  const int own = layout.domain_of(ctx.rank), all = layout.num_domains * locals * num_experts;
  for (int i = threadIdx.x; i < all; i += kPlanThreads) {
    const int expert = i % num_experts, rank = own * locals + i / num_experts % locals;
    const int source = rail_peer_in(ctx, i / num_experts / locals);
    if (rank == ctx.rank || source == ctx.rank) continue;
    const std::uint64_t word =
        load_relaxed(request_word(ctx.control_of[ctx.rank], layout, source, expert));
    post_numbered(request_word(ctx.control_of[rank], layout, source, expert), plans,
                  static_cast<std::uint32_t>(word));
  }
}

// Posts to every rank how many assignments this one has for each expert.
template <typename R>
__device__ void post_requests(const KernelContext& ctx, const R& rails, const int* total,
                              std::uint64_t plans, std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const int locals = layout.local_ranks();
  for (int i = threadIdx.x; i < locals * layout.num_experts; i += kPlanThreads) {
    const int rank =
        rank_at(ctx, (layout.local_rank_of(ctx.rank) + i / layout.num_experts) % locals);
    const int expert = i % layout.num_experts;
    post_numbered(request_word(ctx.control_of[rank], layout, ctx.rank, expert), plans,
                  total[expert]);
  }
  if constexpr (R::kEnabled) forward_requests(ctx, rails, plans, epoch);
}

// Reads all ranks' counts.  False when the group has failed.
__device__ bool receive_requests(const KernelContext& ctx, Shared& shared, std::uint64_t plans,
                                 std::uint64_t epoch) {
  const Control& layout = ctx.control;
  constexpr int kUnroll = 8;
  bool is_complete = true;
  for (int expert = threadIdx.x; expert < layout.num_experts; expert += kPlanThreads) {
    int lower = 0, requested = 0;
    for (int first = 0; first < layout.num_ranks; first += kUnroll) {
      std::uint64_t words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int source = min(first + u, layout.num_ranks - 1);
        words[u] = load_relaxed(request_word(ctx.control_of[ctx.rank], layout, source, expert));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int source = first + u;
        if (source >= layout.num_ranks) break;
        std::int64_t assignments = words[u] & 0xffffffffu;
        if (!has_number(words[u], plans)) {
          assignments = wait_for_numbered(
              ctx, Phase::kPlan, source, epoch,
              request_word(ctx.control_of[ctx.rank], layout, source, expert), plans);
          is_complete = is_complete && assignments >= 0;
        }
        requested += static_cast<int>(assignments);
        if (source < ctx.rank) lower += static_cast<int>(assignments);
      }
    }
    shared.lower[expert] = lower;
    shared.requested[expert] = requested;
  }
  return __syncthreads_and(is_complete);
}

// Computes what every rank would need.  True if it fits on all of them.
__device__ bool everything_fits(const KernelContext& ctx, const Drop& job, Shared& shared,
                                int room) {
  const int num_local = ctx.control.num_local(), lane = threadIdx.x % kWarpSize;
  for (int rank = threadIdx.x / kWarpSize; rank < ctx.control.num_ranks; rank += kPlanWarps) {
    int blocks = 0, requested = 0;
    for (int local = lane; local < num_local; local += kWarpSize) {
      const int assignments = shared.requested[rank * num_local + local];
      blocks += blocks_for(assignments, job.alignment);
      requested += assignments;
    }
    blocks = warp_sum(blocks);
    requested = warp_sum(requested);
    if (lane == 0) {
      shared.blocks[rank] = blocks;
      if (rank == ctx.rank && blockIdx.x == 0) *job.num_requested = requested;
      // Plans of a group run one after the other: nothing else writes here.
      if (job.lacked != nullptr && blocks > room && blockIdx.x == 0) {
        const std::int64_t rows = std::int64_t{blocks - room} * job.alignment;
        job.lacked[rank] = max(job.lacked[rank], rows << 32 | job.max_recv_rows);
      }
    }
  }
  __syncthreads();
  bool fits = true;
  for (int rank = threadIdx.x; rank < ctx.control.num_ranks; rank += kPlanThreads) {
    fits = fits && shared.blocks[rank] <= room;
  }
  return __syncthreads_and(fits);
}

// Alignment blocks of an expert that are open before this token of a chunk.
__device__ inline int blocks_before(const Drop& job, const TokenPartition& partition,
                                    const ChunkTile& tile, const Shared& shared, int chunk,
                                    int expert, int token_in_chunk) {
  const int column = chunk * partition.num_columns() + expert;
  const int in_chunk = count_before(tile.bitmaps[column], token_in_chunk);
  return blocks_for(shared.lower[expert] + tile.before[column] + in_chunk, job.alignment);
}

// Writes the assignments of this CTA's tokens that fit to `kept`.
template <typename Index, typename R>
__device__ void keep_what_fits(const Drop& job, const TokenPartition& partition,
                               const ChunkTile& tile, Shared& shared, int room, bool all_fit) {
  const int columns = partition.num_columns(), num_ranks = partition.num_ranks,
            top_k = partition.top_k;
  const int num_local = partition.num_local();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto ignore = [](int, RankSet, std::uint32_t) {};
  visit_chunks<Index>(
      partition, tile, job.topk_idx, shared.start, ignore, [&](int first, int chunks) {
        const int tokens = min(partition.num_tokens - first * kChunk, chunks * kChunk);
        std::int32_t* kept = job.kept + static_cast<std::size_t>(first) * kChunk * top_k;
        if (all_fit) {
          for (int i = threadIdx.x; i < tokens * top_k; i += kPlanThreads)
            kept[i] = tile.assignments[i];
          return;
        }
        // Replaces each token's assignments per rank by the blocks that they open.
        for (int i = threadIdx.x; i < tokens; i += kPlanThreads) {
          const int chunk = i / kChunk, token_in_chunk = i % kChunk;
          std::uint16_t* opened = tile.of_token + chunk * num_ranks * kChunk + token_in_chunk;
          for (int rank = 0; rank < partition.num_counted(); ++rank) opened[rank * kChunk] = 0;
          for (int k = 0; k < top_k; ++k) {
            const int expert = tile.assignments[i * top_k + k];
            if (expert < 0) continue;
            const int column = chunk * columns + expert;
            const int in_block = shared.lower[expert] + tile.before[column] +
                                 count_before(tile.bitmaps[column], token_in_chunk);
            if (in_block % job.alignment != 0) continue;
            tile.assignments[i * top_k + k] = static_cast<std::int16_t>(expert | kOpens);
            if constexpr (!R::kEnabled) opened[expert / num_local * kChunk] += 1;
          }
        }
        __syncthreads();
        for (int i = warp; i < chunks * partition.num_counted(); i += kPlanWarps) {
          const int chunk = i / num_ranks, rank = i % num_ranks;
          int blocks = 0;
          for (int local = lane; local < num_local; local += kWarpSize) {
            const int expert = rank * num_local + local;
            blocks += blocks_before(job, partition, tile, shared, chunk, expert, 0);
          }
          blocks = warp_sum(blocks);
          if (lane == 0) tile.of_rank[i] = blocks;
          scan_tokens(tile.of_token + i * kChunk);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < tokens * top_k; i += kPlanThreads) {
          const int own = tile.assignments[i];
          int expert = -1;
          if (own >= 0) {
            expert = own & ~kOpens;
            const int token = i / top_k, rank = expert / num_local;
            const int chunk = token / kChunk, token_in_chunk = token % kChunk;
            const int group = chunk * num_ranks + rank;
            int blocks = 0;
            if constexpr (R::kEnabled) {
              for (int other = rank * num_local; other < (rank + 1) * num_local; ++other) {
                blocks += blocks_before(job, partition, tile, shared, chunk, other, token_in_chunk);
              }
            } else {
              blocks = tile.of_rank[group] + tile.of_token[group * kChunk + token_in_chunk];
            }
            for (int k = 0; k < top_k; ++k) {
              const int assignment = tile.assignments[token * top_k + k],
                        other = assignment & ~kOpens;
              blocks += assignment >= kOpens && other >= rank * num_local && other <= expert;
            }
            if (blocks > room) expert = -1;
          }
          kept[i] = expert;
        }
      });
}

template <typename Index, typename R>
__global__ void __launch_bounds__(kPlanThreads, 1)
    drop_kernel(KernelContext ctx, Drop job, PlanScratch scratch, TokenPartition partition,
                const __grid_constant__ R rails) {
  extern __shared__ __align__(16) char memory[];
  const ChunkTile tile(partition, memory);
  Shared shared(partition, memory + partition.tile_bytes());
  const std::uint64_t epoch = current_epoch(ctx), entry = current_entry(ctx);
  // The number of the plan that this belongs to, which `count` will complete.
  const std::uint64_t plans = *static_cast<volatile std::uint64_t*>(&ctx.state->plans) + 1;
  const int room = static_cast<int>(
      min(job.max_recv_rows / job.alignment, static_cast<std::int64_t>(INT32_MAX)));

  // After a failure nothing is written: `count` of this plan will not use it.
  if (!had_failed(ctx)) {
    if (blockIdx.x == 0) enter(ctx, rails, Phase::kPlan, entry, epoch);
    count_part<Index>(partition, tile, job.topk_idx, shared.total, scratch.parts,
                      [](int, RankSet, std::uint32_t) {});
    if (grid_barrier(ctx, Phase::kPlan)) {
      const bool is_leader = blockIdx.x == gridDim.x - 1;
      const int before = min(static_cast<int>(blockIdx.x), partition.num_parts());
      sum_parts(partition, scratch.parts, is_leader ? partition.num_parts() : before, shared.start,
                shared.total);
      if (is_leader) {
        post_requests(ctx, rails, shared.total, plans, epoch);
        if (threadIdx.x == 0 && shared.total[partition.num_columns()] != 0) ctx.state->is_bad = 1;
      }
      if (blockIdx.x == 0 && threadIdx.x < kWarpSize) {
        compare_entries(ctx, rails, Phase::kPlan, entry, epoch);
      }
      if (receive_requests(ctx, shared, plans, epoch)) {
        const bool all_fit = everything_fits(ctx, job, shared, room);
        keep_what_fits<Index, R>(job, partition, tile, shared, room, all_fit);
      }
    }
  }
  if (leave(ctx) && threadIdx.x == 0) {
    leave_call<R>(ctx, entry);
    count_signals<R>(ctx, kRequestsPut, 1);
    ctx.state->epoch = epoch;
  }
}

}  // namespace

template <>
void drop_what_does_not_fit(const KernelContext& ctx, const Drop& arguments,
                            const PlanScratch& scratch, int num_sms, std::uintptr_t stream,
                            const Rails* rails) {
  const TokenPartition partition =
      partition_tokens(arguments.num_tokens, arguments.top_k, ctx, num_sms);
  with_rails(rails, [&](const auto& way) {
    using R = std::decay_t<decltype(way)>;
    const auto kernel =
        arguments.is_int64 ? drop_kernel<std::int64_t, R> : drop_kernel<std::int32_t, R>;
    launch_cooperatively("static mode", kernel, partition.num_ctas, kPlanThreads,
                         partition.tile_bytes() + Shared::num_bytes(partition), stream, ctx,
                         arguments, scratch, partition, way);
  });
}

}  // namespace ncclep::native
