// Which tile of a grouped product a cluster computes next.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ncclep::experts {

constexpr int kTileRows = 128, kTileColumns = 256;  // of a CTA
constexpr int kBlock = 128;                         // values that share a scale
constexpr int kClusterCtas = 2;                     // one tile above the other
constexpr int kGroupedPairs = 8;                    // see `find_tile`

// The sum over this lane and those before it.  Called by whole warps.
__device__ inline int sum_to_lane(int own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int before = __shfl_up_sync(~0u, own, lanes);
    if (lane >= lanes) own += before;
  }
  return own;
}

// One cluster's part of a product.
struct Tile {
  int expert, pair, column;    // `pair` counts tiles of both CTAs from the expert's first row
  int first_row, end_row;      // of the expert
  int first_block, end_block;  // of its rows, where each expert's begin a block of their own
};

// Finds tile `index` of all experts' results; false: there is none.  `rows`: of each result, or 0
// if it has as many as its expert.  Called by whole warps, whose lanes look at an expert each.
// Tiles that follow each other form a block of few rows and few columns, whose operands stay in the
// L2 cache.
__device__ inline bool find_tile(const std::int32_t* offsets, int num_experts, int rows,
                                 int columns, int index, Tile& tile) {
  const int lane = threadIdx.x % 32, num_columns = columns / kTileColumns;
  int tiles_before = 0, blocks_before = 0;
  for (int first = 0; first < num_experts; first += 32) {
    const int expert = min(first + lane, num_experts - 1);
    const int begin = offsets[expert], end = offsets[expert + 1];
    const bool is_expert = first + lane < num_experts;
    const int blocks = is_expert ? (end - begin + kBlock - 1) / kBlock : 0;
    const int height = rows > 0 ? rows : end - begin;
    const int pairs =
        is_expert ? (height + kClusterCtas * kTileRows - 1) / (kClusterCtas * kTileRows) : 0;
    const int end_tile = tiles_before + sum_to_lane(pairs * num_columns);
    const int end_block = blocks_before + sum_to_lane(blocks);
    const unsigned int beyond = __ballot_sync(~0u, index < end_tile);
    if (beyond != 0) {
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      const auto of_expert = [&](int value) { return __shfl_sync(~0u, value, found); };
      const int inside = index - of_expert(end_tile - pairs * num_columns);
      const int all_pairs = of_expert(pairs), of_group = kGroupedPairs * num_columns;
      const int first_pair = inside / of_group * kGroupedPairs;
      const int size = min(kGroupedPairs, all_pairs - first_pair);
      tile = {first + found,
              first_pair + inside % of_group % size,
              inside % of_group / size * kTileColumns,
              of_expert(begin),
              of_expert(end),
              of_expert(end_block - blocks),
              of_expert(end_block)};
      return true;
    }
    tiles_before = __shfl_sync(~0u, end_tile, 31);
    blocks_before = __shfl_sync(~0u, end_block, 31);
  }
  return false;
}

}  // namespace ncclep::experts
