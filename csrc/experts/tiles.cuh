// Which tile of a grouped product a cluster computes next.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ncclep::experts {

constexpr int kTileRows = 128, kTileColumns = 256;  // of a CTA
constexpr int kBlock = 128;                         // values that share a scale
constexpr int kClusterCtas = 2;                     // one tile above the other
constexpr int kGroupedPairs = 8;                    // see `Tiles::next`

// One cluster's part of a product.
struct Tile {
  int expert, pair, column;    // `pair` counts tiles of both CTAs from the expert's first row
  int first_row, end_row;      // of the expert
  int first_block, end_block;  // of its rows, where each expert's begin a block of their own
};

// All clusters take every gridDim-th tile, expert by expert.
class Tiles {
 public:
  // `rows`: of every expert's result, or 0: as many as the expert has.
  __device__ Tiles(const std::int32_t* offsets, int num_experts, int rows, int columns)
      : offsets_(offsets),
        num_experts_(num_experts),
        rows_(rows),
        num_columns_(columns / kTileColumns),
        index_(blockIdx.x / kClusterCtas) {
    enter();
  }

  // The next tile, or false.  Tiles that run at the same time form a block of few rows and few
  // columns, whose operands stay in the L2 cache.
  __device__ bool next(Tile& tile) {
    while (tile_.expert < num_experts_ && index_ >= end_) {
      ++tile_.expert;
      tile_.first_row = tile_.end_row;
      tile_.first_block = tile_.end_block;
      begin_ = end_;
      enter();
    }
    if (tile_.expert >= num_experts_) return false;
    const int inside = index_ - begin_, of_group = kGroupedPairs * num_columns_;
    const int first = inside / of_group * kGroupedPairs;
    const int size = min(kGroupedPairs, num_pairs_ - first);
    tile_.pair = first + inside % of_group % size;
    tile_.column = inside % of_group / size * kTileColumns;
    tile = tile_;
    index_ += gridDim.x / kClusterCtas;
    return true;
  }

 private:
  __device__ void enter() {
    if (tile_.expert >= num_experts_) return;
    tile_.end_row = offsets_[tile_.expert + 1];
    const int num_rows = tile_.end_row - tile_.first_row;
    tile_.end_block = tile_.first_block + (num_rows + kBlock - 1) / kBlock;
    const int rows = rows_ > 0 ? rows_ : num_rows;
    num_pairs_ = (rows + kClusterCtas * kTileRows - 1) / (kClusterCtas * kTileRows);
    end_ = begin_ + num_pairs_ * num_columns_;
  }

  const std::int32_t* offsets_;
  int num_experts_, rows_, num_columns_;
  Tile tile_{};
  int index_, begin_ = 0, end_ = 0, num_pairs_ = 0;
};

}  // namespace ncclep::experts
