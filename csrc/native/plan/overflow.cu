// Every rank tells every other how many assignments it has for each expert.  From that, a rank
// knows which of its own assignments open a new alignment block of `alignment` rows, and how many
// blocks are open at the destination before each chunk of its tokens:
//
//     place of an assignment in its expert's block =
//         assignments of lower ranks + this rank's assignments before it
//     it opens an alignment block if place % alignment == 0
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
  int* start;   // [columns + 1]: before this CTA
  int* total;   // [columns + 1]: of this rank
  int* lower;   // [E]: of lower ranks
  int* wanted;  // [E]: of all ranks
  int* blocks;  // [R]: blocks that each rank would need

  __device__ Shared(const TokenPartition& partition, char* memory)
      : start(reinterpret_cast<int*>(memory)),
        total(start + partition.part_size()),
        lower(total + partition.part_size()),
        wanted(lower + partition.num_experts),
        blocks(wanted + partition.num_experts) {}

  static std::size_t num_bytes(const TokenPartition& partition) {
    return sizeof(int) *
           (2 * partition.part_size() + 2 * partition.num_experts + partition.num_ranks);
  }
};

NCCLEP_BOTH inline int blocks_for(int rows, int alignment) {
  return (rows + alignment - 1) / alignment;
}

__device__ std::uint64_t* wanted_word(char* control, const Control& layout, int source,
                                      int expert) {
  return reinterpret_cast<std::uint64_t*>(control + layout.wanted()) + source * layout.num_experts +
         expert;
}

// Puts this rank's counts to the rail peers, and posts theirs to the ranks of this domain.
template <typename R>
__device__ void pass_wanted_on(const KernelContext& me, const R& rails, std::uint64_t plans,
                               std::uint64_t epoch) {
  const Control& layout = me.control;
  const int domain = threadIdx.x, locals = layout.local_ranks(), num_experts = layout.num_experts;
  __syncthreads();
  bool is_here = true;
  if (has_rail_peer(me, domain)) {
    const std::size_t row = layout.wanted() + std::size_t{8} * me.rank * num_experts;
    is_here = put(me, rails, Phase::kPlan, epoch, kControlWindow, domain, row, row,
                  std::size_t{8} * num_experts, kWantedPut) &&
              wait_for_signal(me, rails, Phase::kPlan, kWantedPut, domain, 1, epoch);
  }
  if (!__syncthreads_and(is_here)) return;
  const int own = layout.domain_of(me.rank), all = layout.num_domains * locals * num_experts;
  for (int i = threadIdx.x; i < all; i += kPlanThreads) {
    const int expert = i % num_experts, rank = own * locals + i / num_experts % locals;
    const int source = rail_peer_in(me, i / num_experts / locals);
    if (rank == me.rank || source == me.rank) continue;
    const std::uint64_t word =
        load_relaxed(wanted_word(me.control_of[me.rank], layout, source, expert));
    post_numbered(wanted_word(me.control_of[rank], layout, source, expert), plans,
                  static_cast<std::uint32_t>(word));
  }
}

// Posts to every rank how many assignments this one has for each expert.
template <typename R>
__device__ void post_wanted(const KernelContext& me, const R& rails, const int* total,
                            std::uint64_t plans, std::uint64_t epoch) {
  const Control& layout = me.control;
  const int locals = layout.local_ranks();
  for (int i = threadIdx.x; i < locals * layout.num_experts; i += kPlanThreads) {
    const int rank = local_rank(me, (layout.place_of(me.rank) + i / layout.num_experts) % locals);
    const int expert = i % layout.num_experts;
    post_numbered(wanted_word(me.control_of[rank], layout, me.rank, expert), plans, total[expert]);
  }
  if constexpr (R::kAreThere) pass_wanted_on(me, rails, plans, epoch);
}

// Reads all ranks' counts.  False when the group has failed.
__device__ bool take_wanted(const KernelContext& me, Shared& shared, std::uint64_t plans,
                            std::uint64_t epoch) {
  const Control& layout = me.control;
  constexpr int kUnroll = 8;
  bool is_complete = true;
  for (int expert = threadIdx.x; expert < layout.num_experts; expert += kPlanThreads) {
    int lower = 0, wanted = 0;
    for (int first = 0; first < layout.num_ranks; first += kUnroll) {
      std::uint64_t words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int source = min(first + u, layout.num_ranks - 1);
        words[u] = load_relaxed(wanted_word(me.control_of[me.rank], layout, source, expert));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int source = first + u;
        if (source >= layout.num_ranks) break;
        std::int64_t assignments = words[u] & 0xffffffffu;
        if (!has_number(words[u], plans)) {
          assignments =
              wait_for_numbered(me, Phase::kPlan, source, epoch,
                                wanted_word(me.control_of[me.rank], layout, source, expert), plans);
          is_complete = is_complete && assignments >= 0;
        }
        wanted += static_cast<int>(assignments);
        if (source < me.rank) lower += static_cast<int>(assignments);
      }
    }
    shared.lower[expert] = lower;
    shared.wanted[expert] = wanted;
  }
  return __syncthreads_and(is_complete);
}

// Computes what every rank would need.  True if it fits on all of them.
__device__ bool everything_fits(const KernelContext& me, const Drop& job, Shared& shared,
                                int room) {
  const int num_local = me.control.num_local(), lane = threadIdx.x % kWarpSize;
  for (int rank = threadIdx.x / kWarpSize; rank < me.control.num_ranks; rank += kPlanWarps) {
    int blocks = 0, wanted = 0;
    for (int local = lane; local < num_local; local += kWarpSize) {
      const int assignments = shared.wanted[rank * num_local + local];
      blocks += blocks_for(assignments, job.alignment);
      wanted += assignments;
    }
    blocks = warp_sum(blocks);
    wanted = warp_sum(wanted);
    if (lane == 0) {
      shared.blocks[rank] = blocks;
      if (rank == me.rank && blockIdx.x == 0) *job.num_requested = wanted;
      // Plans of a group run one after the other: nothing else writes here.
      if (job.lacked != nullptr && blocks > room && blockIdx.x == 0) {
        const std::int64_t rows = std::int64_t{blocks - room} * job.alignment;
        job.lacked[rank] = max(job.lacked[rank], rows << 32 | job.max_recv_rows);
      }
    }
  }
  __syncthreads();
  bool fits = true;
  for (int rank = threadIdx.x; rank < me.control.num_ranks; rank += kPlanThreads) {
    fits = fits && shared.blocks[rank] <= room;
  }
  return __syncthreads_and(fits);
}

// Alignment blocks of an expert that are open before the token in `place` of a chunk.
__device__ inline int blocks_before(const Drop& job, const TokenPartition& partition,
                                    const ChunkTile& tile, const Shared& shared, int chunk,
                                    int expert, int place) {
  const int column = chunk * partition.num_columns() + expert;
  const int in_chunk = count_before(tile.bitmaps[column], place);
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
          const int chunk = i / kChunk, place = i % kChunk;
          std::uint16_t* opened = tile.of_token + chunk * num_ranks * kChunk + place;
          for (int rank = 0; rank < partition.num_counted(); ++rank) opened[rank * kChunk] = 0;
          for (int k = 0; k < top_k; ++k) {
            const int expert = tile.assignments[i * top_k + k];
            if (expert < 0) continue;
            const int column = chunk * columns + expert;
            const int in_block = shared.lower[expert] + tile.before[column] +
                                 count_before(tile.bitmaps[column], place);
            if (in_block % job.alignment != 0) continue;
            tile.assignments[i * top_k + k] = static_cast<std::int16_t>(expert | kOpens);
            if constexpr (!R::kAreThere) opened[expert / num_local * kChunk] += 1;
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
            const int chunk = token / kChunk, place = token % kChunk;
            const int group = chunk * num_ranks + rank;
            int blocks = 0;
            if constexpr (R::kAreThere) {
              for (int other = rank * num_local; other < (rank + 1) * num_local; ++other) {
                blocks += blocks_before(job, partition, tile, shared, chunk, other, place);
              }
            } else {
              blocks = tile.of_rank[group] + tile.of_token[group * kChunk + place];
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
    drop_kernel(KernelContext me, Drop job, PlanScratch scratch, TokenPartition partition,
                const __grid_constant__ R rails) {
  extern __shared__ __align__(16) char memory[];
  const ChunkTile tile(partition, memory);
  Shared shared(partition, memory + partition.tile_bytes());
  const std::uint64_t epoch = current_epoch(me), entry = current_entry(me);
  // The number of the plan that this belongs to, which `count` will complete.
  const std::uint64_t plans = *static_cast<volatile std::uint64_t*>(&me.state->plans) + 1;
  const int room = static_cast<int>(
      min(job.max_recv_rows / job.alignment, static_cast<std::int64_t>(INT32_MAX)));

  // After a failure nothing is written: `count` of this plan will not use it.
  if (!had_failed(me)) {
    if (blockIdx.x == 0) enter(me, rails, Phase::kPlan, entry, epoch);
    count_part<Index>(partition, tile, job.topk_idx, shared.total, scratch.parts,
                      [](int, RankSet, std::uint32_t) {});
    if (grid_barrier(me, Phase::kPlan)) {
      const bool is_leader = blockIdx.x == gridDim.x - 1;
      const int before = min(static_cast<int>(blockIdx.x), partition.num_parts());
      sum_parts(partition, scratch.parts, is_leader ? partition.num_parts() : before, shared.start,
                shared.total);
      if (is_leader) {
        post_wanted(me, rails, shared.total, plans, epoch);
        if (threadIdx.x == 0 && shared.total[partition.num_columns()] != 0) me.state->is_bad = 1;
      }
      if (blockIdx.x == 0 && threadIdx.x < kWarpSize) {
        compare_entries(me, rails, Phase::kPlan, entry, epoch);
      }
      if (take_wanted(me, shared, plans, epoch)) {
        const bool all_fit = everything_fits(me, job, shared, room);
        keep_what_fits<Index, R>(job, partition, tile, shared, room, all_fit);
      }
    }
  }
  if (leave(me) && threadIdx.x == 0) {
    leave_call<R>(me, entry);
    count_signals<R>(me, kWantedPut, 1);
    me.state->epoch = epoch;
  }
}

}  // namespace

template <>
void drop_what_does_not_fit(const KernelContext& me, const Drop& arguments,
                            const PlanScratch& scratch, int num_sms, std::uintptr_t stream,
                            const Rails* rails) {
  const TokenPartition partition =
      partition_tokens(arguments.num_tokens, arguments.top_k, me, num_sms);
  with_rails(rails, [&](const auto& way) {
    using R = std::decay_t<decltype(way)>;
    const auto kernel =
        arguments.is_int64 ? drop_kernel<std::int64_t, R> : drop_kernel<std::int32_t, R>;
    launch_cooperatively("static mode", kernel, partition.num_ctas, kPlanThreads,
                         partition.tile_bytes() + Shared::num_bytes(partition), stream, me,
                         arguments, scratch, partition, way);
  });
}

}  // namespace ncclep::native
