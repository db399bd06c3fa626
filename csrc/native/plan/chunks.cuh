// A rank's tokens in chunks, in shared memory: shared by the kernels of plan.
//
// Every CTA has a range of chunks and holds as many of them at a time as fit.  For each chunk it
// has a bitmap over the tokens for every *column*: first one per expert (tokens with an assignment
// for it), then one per rank (tokens with a pair on it) and, if there are several NVLink domains,
// one per domain (node tokens).  Indices are prefix sums over tokens: the
// population count of a bitmap inside a chunk, plus sums of such counts over the earlier chunks and
// CTAs.  Nothing depends on the order in which threads run.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "native/device/warp.cuh"
#include "native/rail_layout.h"
#include "native/rank_set.cuh"
#include "native/state.h"

namespace ncclep::native {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;
// Of a CTA's shared memory, and what the kernels have of other arrays, at most.
constexpr std::size_t kMaxHeldBytes = 148 * 1024;
constexpr std::size_t kMaxOtherBytes = 72 * 1024;

static_assert(kChunk == 128, "a bitmap is two words of 64 bits");

// How the tokens are partitioned among the CTAs.
struct TokenPartition {
  int num_tokens, top_k, num_experts, num_ranks;
  int num_domains;              // 0: there is only one
  int first_rank, local_ranks;  // of this rank's domain
  int num_ctas;                 // the last one has no tokens where possible
  int per_cta;                  // chunks of a CTA, at most
  int tile_chunks;              // chunks in shared memory at a time

  NCCLEP_BOTH int num_chunks() const { return (num_tokens + kChunk - 1) / kChunk; }
  NCCLEP_BOTH int num_local() const { return num_experts / num_ranks; }
  NCCLEP_BOTH int num_columns() const { return num_experts + num_ranks + num_domains; }
  NCCLEP_BOTH int column_of_domain(int domain) const { return num_experts + num_ranks + domain; }
  // Ranks for which a token's assignments are counted: none with several domains, where there may
  // be too many ranks, and each with few experts, whose bitmaps say the same.
  NCCLEP_BOTH int num_counted() const { return num_domains > 0 ? 0 : num_ranks; }
  // CTAs with tokens; each writes its counts per column, and whether its routing is bad, to
  // scratch.
  NCCLEP_BOTH int num_parts() const { return (num_chunks() + per_cta - 1) / per_cta; }
  NCCLEP_BOTH int part_size() const { return num_columns() + 1; }

  // Offsets of the arrays of `ChunkTile`, in units of `tile_chunks` bytes.
  NCCLEP_BOTH std::size_t assignments() const { return num_columns() * sizeof(ulonglong2); }
  NCCLEP_BOTH std::size_t of_token() const { return assignments() + 2 * kChunk * top_k; }
  NCCLEP_BOTH std::size_t before() const { return of_token() + 2 * kChunk * num_counted(); }
  NCCLEP_BOTH std::size_t of_rank() const { return before() + 4 * num_columns(); }
  NCCLEP_BOTH std::size_t chunk_bytes() const { return of_rank() + 4 * num_ranks; }
  NCCLEP_BOTH std::size_t tile_bytes() const { return tile_chunks * chunk_bytes(); }
};

inline TokenPartition partition_tokens(int num_tokens, int top_k, const KernelContext& ctx,
                                       int num_sms) {
  const Control& control = ctx.control;
  TokenPartition partition{num_tokens,
                           top_k,
                           control.num_experts,
                           control.num_ranks,
                           0,
                           ctx.control_of.first_rank,
                           control.local_ranks(),
                           1,
                           1,
                           1};
  if (control.num_domains > 1) partition.num_domains = control.num_domains;
  partition.num_ctas = std::min(num_sms, partition.num_chunks() + 1);
  partition.per_cta =
      std::max(1, (partition.num_chunks() + partition.num_ctas - 1) / partition.num_ctas);
  partition.tile_chunks =
      std::min(partition.per_cta, static_cast<int>(kMaxHeldBytes / partition.chunk_bytes()));
  return partition;
}

// Chunks in shared memory.  `[chunk]` indexes the chunks of the tile, and `[token_in_chunk]` the
// tokens of one.
struct ChunkTile {
  ulonglong2* bitmaps;        // [chunk][column]
  std::int16_t* assignments;  // [chunk][token_in_chunk][k]: expert, or -1
  std::uint16_t*
      of_token;           // [chunk][rank][token_in_chunk]: a token's assignments for a counted rank
  std::int32_t* before;   // [chunk][column]: count over this rank's tokens before the chunk
  std::int32_t* of_rank;  // [chunk][rank]

  __device__ ChunkTile(const TokenPartition& partition, char* memory)
      : bitmaps(reinterpret_cast<ulonglong2*>(memory)),
        assignments(reinterpret_cast<std::int16_t*>(memory + partition.tile_chunks *
                                                                 partition.assignments())),
        of_token(reinterpret_cast<std::uint16_t*>(memory +
                                                  partition.tile_chunks * partition.of_token())),
        before(
            reinterpret_cast<std::int32_t*>(memory + partition.tile_chunks * partition.before())),
        of_rank(reinterpret_cast<std::int32_t*>(memory +
                                                partition.tile_chunks * partition.of_rank())) {}
};

__device__ inline int count(ulonglong2 bitmap) { return __popcll(bitmap.x) + __popcll(bitmap.y); }

// Tokens of a chunk before one.
__device__ inline int count_before(ulonglong2 bitmap, int token_in_chunk) {
  const unsigned long long lower = (1ull << token_in_chunk % 64) - 1;
  return token_in_chunk < 64 ? __popcll(bitmap.x & lower)
                             : __popcll(bitmap.x) + __popcll(bitmap.y & lower);
}

__device__ inline bool has_token(ulonglong2 bitmap, int token_in_chunk) {
  return (token_in_chunk < 64 ? bitmap.x : bitmap.y) >> token_in_chunk % 64 & 1;
}

// Writes the sums of value(0) to value(i - 1) to to[i], for i from 0 to `number`; returns the last
// one.  Called by one warp.
template <typename Value>
__device__ int prefix_sum(int number, std::int32_t* to, Value&& value) {
  const int lane = threadIdx.x % kWarpSize;
  int sum = 0;
  for (int first = 0; first < number; first += kWarpSize) {
    const int i = first + lane;
    const int sum_to_here = sum + warp_scan(i < number ? value(i) : 0);
    if (i < number) to[i + 1] = sum_to_here;
    sum = __shfl_sync(~0u, sum_to_here, kWarpSize - 1);
  }
  if (lane == 0) to[0] = 0;
  return sum;
}

// Turns each token's count in a chunk into the sum over the tokens before it.  Called by one warp.
__device__ inline void scan_tokens(std::uint16_t* of_token) {
  const int lane = threadIdx.x % kWarpSize;
  int sum = 0;
#pragma unroll
  for (int first = 0; first < kChunk; first += kWarpSize) {
    const int own = of_token[first + lane];
    const int scanned = warp_scan(own);
    of_token[first + lane] = static_cast<std::uint16_t>(sum + scanned - own);
    sum += __shfl_sync(~0u, scanned, kWarpSize - 1);
  }
}

template <typename Index>
__device__ std::int16_t expert_of(Index value, int num_experts, bool& is_good) {
  if (value >= 0 && value < num_experts) return static_cast<std::int16_t>(value);
  is_good = is_good && value == -1;
  return -1;
}

// Loads `number` entries of topk_idx into shared memory; invalid experts become -1.
template <typename Index>
__device__ bool load_assignments(const Index* from, int number, int num_experts,
                                 std::int16_t* assignments) {
  constexpr int kWidth = 16 / sizeof(Index), kUnroll = 4;
  struct alignas(16) Vector {
    Index values[kWidth];
  };
  bool is_good = true;
  const auto* vectors = reinterpret_cast<const Vector*>(from);
  const int num_vectors = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 ? number / kWidth : 0;
  for (int first = threadIdx.x; first < num_vectors; first += kUnroll * kPlanThreads) {
    Vector loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kPlanThreads < num_vectors) loaded[u] = vectors[first + u * kPlanThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * kPlanThreads;
      if (i >= num_vectors) break;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        assignments[i * kWidth + j] = expert_of(loaded[u].values[j], num_experts, is_good);
      }
    }
  }
  for (int i = num_vectors * kWidth + threadIdx.x; i < number; i += kPlanThreads) {
    assignments[i] = expert_of(from[i], num_experts, is_good);
  }
  return is_good;
}

// Reads `chunks` chunks: assignments, bitmaps, and in `of_token` the assignments of each token for
// each rank.  Calls `each(token, ranks, assignments)` with the ranks of this domain and one bit for
// each assignment.  False for a thread that has found an invalid expert, or one that its token had
// named before: both count as not routed.
template <typename Index, typename Each>
__device__ bool read_chunks(const TokenPartition& partition, const ChunkTile& tile,
                            const void* topk_idx, int first_chunk, int chunks, Each&& each) {
  const int columns = partition.num_columns(), num_ranks = partition.num_ranks,
            top_k = partition.top_k;
  const int first_token = first_chunk * kChunk, num_local = partition.num_local();
  const int tokens = min(partition.num_tokens - first_token, chunks * kChunk);
  for (int i = threadIdx.x; i < chunks * columns; i += kPlanThreads) tile.bitmaps[i] = {0, 0};
  for (int i = threadIdx.x; i < chunks * partition.num_counted() * kChunk; i += kPlanThreads) {
    tile.of_token[i] = 0;
  }
  const auto* from =
      static_cast<const Index*>(topk_idx) + static_cast<std::size_t>(first_token) * top_k;
  bool is_good = load_assignments(from, tokens * top_k, partition.num_experts, tile.assignments);
  __syncthreads();
  for (int i = threadIdx.x; i < tokens; i += kPlanThreads) {
    const int chunk = i / kChunk, token_in_chunk = i % kChunk;
    auto* words =
        reinterpret_cast<unsigned int*>(tile.bitmaps + chunk * columns) + token_in_chunk / 32;
    const unsigned int bit = 1u << token_in_chunk % 32;
    RankSet ranks{};
    std::uint32_t assignments = 0;
    for (int k = 0; k < top_k; ++k) {
      const int expert = tile.assignments[i * top_k + k];
      if (expert < 0) continue;
      if (atomicOr(words + 4 * expert, bit) & bit) {
        tile.assignments[i * top_k + k] = -1;
        is_good = false;
        continue;
      }
      const int rank = expert / num_local, here = rank - partition.first_rank;
      if (0 <= here && here < partition.local_ranks) ranks |= one_rank(here);
      assignments |= 1u << k;
      if (partition.num_domains > 0) {
        atomicOr(words + 4 * (partition.num_experts + rank), bit);
        atomicOr(words + 4 * partition.column_of_domain(rank / partition.local_ranks), bit);
      } else {
        tile.of_token[(chunk * num_ranks + rank) * kChunk + token_in_chunk] += 1;
      }
    }
#pragma unroll
    for (int group = 0; group < kRankGroups; ++group) {
      const int first = partition.num_experts + group * kWarpSize;
      std::uint32_t left = partition.num_domains > 0 ? 0 : word_of(ranks, group);
      for (; left != 0; left &= left - 1) atomicOr(words + 4 * (first + __ffs(left) - 1), bit);
    }
    each(first_token + i, ranks, assignments);
  }
  __syncthreads();
  return is_good;
}

// Reads all chunks of this CTA once and writes its count of each column to `scratch`, from where
// `sum_parts` reads it after a grid barrier.
template <typename Index, typename Each>
__device__ void count_part(const TokenPartition& partition, const ChunkTile& tile,
                           const void* topk_idx, int* total, std::int32_t* scratch, Each&& each) {
  const int columns = partition.num_columns();
  const int first = blockIdx.x * partition.per_cta;
  const int end = min(first + partition.per_cta, partition.num_chunks());
  if (first >= end) return;
  for (int column = threadIdx.x; column < columns; column += kPlanThreads) total[column] = 0;
  bool is_good = true;
  for (int chunk = first; chunk < end; chunk += partition.tile_chunks) {
    const int chunks = min(partition.tile_chunks, end - chunk);
    is_good = read_chunks<Index>(partition, tile, topk_idx, chunk, chunks, each) && is_good;
    for (int column = threadIdx.x; column < columns; column += kPlanThreads) {
      for (int i = 0; i < chunks; ++i) total[column] += count(tile.bitmaps[i * columns + column]);
    }
    is_good = __syncthreads_and(is_good);
  }
  std::int32_t* part = scratch + blockIdx.x * partition.part_size();
  for (int column = threadIdx.x; column < columns; column += kPlanThreads) {
    __stcg(part + column, total[column]);
  }
  if (threadIdx.x == 0) __stcg(part + columns, is_good ? 0 : 1);
}

// Sums each column's counts over the CTAs before this one, into `before`, and over the first
// `parts` CTAs, into `total`, both in shared memory.
__device__ inline void sum_parts(const TokenPartition& partition, const std::int32_t* scratch,
                                 int parts, int* before, int* total) {
  constexpr int kUnroll = 24;  // loads in flight: one turn covers the usual number of CTAs
  for (int column = threadIdx.x; column < partition.part_size(); column += kPlanThreads) {
    int sum_before = 0, sum = 0;
    for (int first = 0; first < parts; first += kUnroll) {
      int values[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        values[u] =
            first + u < parts ? __ldcg(scratch + (first + u) * partition.part_size() + column) : 0;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        sum += values[u];
        if (first + u < static_cast<int>(blockIdx.x)) sum_before += values[u];
      }
    }
    before[column] = sum_before;
    total[column] = sum;
  }
  __syncthreads();
}

// Calls `use(first chunk, chunks)` for the chunks of this CTA, as many as a tile holds, with
// `tile.before` of each filled in.  `start` is `before` as `sum_parts` computed it; it is
// overwritten.
template <typename Index, typename Each, typename Use>
__device__ void visit_chunks(const TokenPartition& partition, const ChunkTile& tile,
                             const void* topk_idx, int* start, Each&& each, Use&& use) {
  const int columns = partition.num_columns();
  const int first = blockIdx.x * partition.per_cta;
  const int end = min(first + partition.per_cta, partition.num_chunks());
  for (int chunk = first; chunk < end; chunk += partition.tile_chunks) {
    const int chunks = min(partition.tile_chunks, end - chunk);
    // If all chunks fit, they are still in shared memory.
    if (end - first > partition.tile_chunks)
      read_chunks<Index>(partition, tile, topk_idx, chunk, chunks, each);
    for (int column = threadIdx.x; column < columns; column += kPlanThreads) {
      int sum = start[column];
      for (int i = 0; i < chunks; ++i) {
        tile.before[i * columns + column] = sum;
        sum += count(tile.bitmaps[i * columns + column]);
      }
      start[column] = sum;
    }
    __syncthreads();
    use(chunk, chunks);
    __syncthreads();
  }
}

}  // namespace ncclep::native
