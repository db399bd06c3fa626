// Products of experts' FP8 rows: a CTA's last warpgroup loads, the other two multiply.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "experts/hopper.cuh"
#include "experts/tiles.cuh"

namespace ncclep::experts {

constexpr int kMultipliers = 2;  // warpgroups, each with 64 rows of the tile
constexpr int kGemmThreads = (kMultipliers + 1) * 128;
constexpr int kStages = 3;
constexpr int kHalves = kTileColumns / kBlock;  // of the columns: what one product computes
constexpr int kSums = kBlock / 2;               // of a thread, in a half
constexpr int kBytesOfA = kTileRows * kBlock, kBytesOfB = kTileColumns * kBlock;
// Rows' scales that are loaded with a tile: a box begins at a multiple of 16 bytes, an expert's
// rows anywhere.
constexpr int kScalesOfA = kTileRows + 16 / sizeof(float);
constexpr int kPitchOfScales = (kScalesOfA + 31) / 32 * 32;  // boxes are 128-byte aligned
// Results are written by copies of 16 rows, a warp's, of 128 bytes each.
constexpr int kOutRows = 16, kOutPitch = 128, kOutBytes = kOutRows * kOutPitch;
constexpr int kWarpOut = 4 * kOutBytes;  // a warp's bf16 results of a tile
template <typename T>
constexpr int kOutColumns = kOutPitch / static_cast<int>(sizeof(T));

struct Gemm {
  const std::int32_t* offsets;  // [num_experts + 1]: where each expert's rows begin and end
  int num_experts;
  int rows;               // of a weight gradient; 0: these are the experts' rows
  int columns, depth;     // of the result; and what is summed, unless that is the experts' rows
  const float* scales_b;  // [num_experts, columns / 128, depth / 128]: of weights
  void* out;              // bf16 [num_rows, columns]
  bool adds;              // to what a weight gradient was before
};

struct __align__(1024) GemmShared {
  char a[kStages][kBytesOfA], b[kStages][kBytesOfB];
  char out[kMultipliers * 4][kWarpOut];
  float scales_a[kStages][kPitchOfScales];
  float scales_b[kStages][kTileColumns];  // of weight gradients
  std::uint64_t full[kStages], empty[kStages];
};

// Where in it a stage begins, and what a warp writes.
struct Layout {
  using Address = hopper::Address;
  Address base;
  __device__ Address a(int s) const { return base + s * kBytesOfA; }
  __device__ Address b(int s) const { return at(offsetof(GemmShared, b), s, kBytesOfB); }
  __device__ Address out(int warp) const { return at(offsetof(GemmShared, out), warp, kWarpOut); }
  __device__ Address scales_a(int s) const {
    return at(offsetof(GemmShared, scales_a), s, kPitchOfScales * 4);
  }
  __device__ Address scales_b(int s) const {
    return at(offsetof(GemmShared, scales_b), s, kTileColumns * 4);
  }
  __device__ Address full(int s) const { return at(offsetof(GemmShared, full), s, 8); }
  __device__ Address empty(int s) const { return at(offsetof(GemmShared, empty), s, 8); }

 private:
  __device__ Address at(std::size_t first, int number, int size) const {
    return base + static_cast<int>(first) + number * size;
  }
};

struct GemmMaps {
  CUtensorMap a, b, scales_a, out;
  CUtensorMap scales_b;  // of weight gradients
};

// Where a pipeline is.
struct Stage {
  int index = 0, parity = 0;
  __device__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// All clusters take every num_clusters()-th tile.
__device__ inline int cluster_index() { return blockIdx.x / kClusterCtas; }
__device__ inline int num_clusters() { return gridDim.x / kClusterCtas; }
__device__ inline bool find_tile(const Gemm& gemm, int index, Tile& tile) {
  return find_tile(gemm.offsets, gemm.num_experts, gemm.rows, gemm.columns, index, tile);
}

template <bool kIsWeights>
__device__ int first_step(const Tile& tile) {
  return kIsWeights ? tile.first_block : 0;
}
template <bool kIsWeights>
__device__ int end_step(const Tile& tile, const Gemm& gemm) {
  return kIsWeights ? tile.end_block : gemm.depth / kBlock;
}
template <bool kIsWeights>
__device__ int first_row(const Tile& tile, int cta) {
  return (kIsWeights ? 0 : tile.first_row) + (tile.pair * kClusterCtas + cta) * kTileRows;
}

// One warp finds tiles, and one thread of it loads: its CTA's rows of a, half of the columns of b
// for both CTAs, and scales.
template <bool kIsWeights>
__device__ void load_tiles(const GemmMaps& maps, const Gemm& gemm, const Layout& shared, int cta) {
  constexpr int kHalfBytes = kBytesOfB / kClusterCtas;
  constexpr int kHalfRows = kTileColumns / kClusterCtas;
  constexpr int kBytes = kBytesOfA + kBytesOfB + (kScalesOfA + (kIsWeights ? kTileColumns : 0)) * 4;
  Stage stage;
  Tile tile;
  for (int index = cluster_index(); find_tile(gemm, index, tile); index += num_clusters()) {
    const int row = first_row<kIsWeights>(tile, cta), end = end_step<kIsWeights>(tile, gemm);
    const int column = (kIsWeights ? 0 : tile.expert * gemm.columns) + tile.column;
    for (int step = first_step<kIsWeights>(tile); step < end; ++step, stage.advance()) {
      if (threadIdx.x % 32 != 0) continue;
      // What is transposed has its blocks one after the other.
      const int x = kIsWeights ? 0 : step * kBlock;
      const int y_of_a = row + (kIsWeights ? step * gemm.rows : 0);
      const int y_of_b = column + (kIsWeights ? step * gemm.columns : 0);
      const int s = stage.index;
      hopper::wait(shared.empty(s), stage.parity ^ 1);
      const hopper::Address full = shared.full(s);
      hopper::arrive_and_expect(full, kBytes);
      hopper::load_box(shared.a(s), maps.a, x, y_of_a, full);
      hopper::load_box_for((1 << kClusterCtas) - 1, shared.b(s) + cta * kHalfBytes, maps.b, x,
                           y_of_b + cta * kHalfRows, full);
      hopper::load_box(shared.scales_a(s), maps.scales_a, row & ~3, step, full);
      if constexpr (kIsWeights) {
        hopper::load_box(shared.scales_b(s), maps.scales_b, column, step, full);
      }
    }
    __syncwarp();
  }
}

using Sums = float[kSums];

// total += product * scales.  `rows`: scales of a thread's two rows.
__device__ inline void promote(Sums& total, const Sums& product, const float (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) total[i] += product[i] * rows[i / 2 % 2];
}

// Scales of some of a thread's columns, 8 columns apart.
struct ColumnScales {
  static constexpr int kPairs = kSums / 8;
  float2 pairs[kPairs];
  __device__ void load(hopper::Address first, int pair) {
    pairs[pair] = hopper::load_pair(first + pair * 32);
  }
};

// The same, where every column has a scale too: `own` those of the first half of `columns`.  They
// are read while others are used.
__device__ inline void promote(Sums& total, const Sums& product, const float (&rows)[2],
                               ColumnScales& own, hopper::Address columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int pair = 0; pair < ColumnScales::kPairs; ++pair) {
      const float2 scale = own.pairs[pair];
      if (half == 0) own.load(columns + ColumnScales::kPairs * 32, pair);
      const int i = (half * ColumnScales::kPairs + pair) * 4;
      total[i] += product[i] * (rows[0] * scale.x);
      total[i + 1] += product[i + 1] * (rows[0] * scale.y);
      total[i + 2] += product[i + 2] * (rows[1] * scale.x);
      total[i + 3] += product[i + 3] * (rows[1] * scale.y);
    }
  }
}

// Writes a warp's 16 x 128 sums as bf16, without waiting until it is done; where rows of the next
// expert follow among the 16, the warp writes `num_rows` itself.  `staging` is free.
__device__ inline void write_rows(const Sums& total, hopper::Address staging,
                                  const CUtensorMap& map, const Gemm& gemm, int column, int row,
                                  int num_rows) {
  constexpr int kColumns = kOutColumns<__nv_bfloat16>;
  const int lane = threadIdx.x % 32;
  // Where columns 8 chunk to 8 chunk + 7 of a row are.
  const auto place = [&](int of_row, int chunk) {
    const int byte = of_row * kOutPitch + chunk * 16 % kOutPitch;
    return staging + chunk * 8 / kColumns * kOutBytes + (byte ^ of_row % 8 * 16);
  };
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const int of_row = lane / 4 + i / 2 % 2 * 8;
    hopper::store(place(of_row, i / 4) + lane % 4 * 4, hopper::to_bf16(total[i], total[i + 1]));
  }
  if (num_rows >= kOutRows) {
    hopper::show_to_copies();
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int copy = 0; copy < kBlock / kColumns; ++copy) {
      hopper::store_box(map, column + copy * kColumns, row, staging + copy * kOutBytes);
    }
    hopper::end_stores();
    return;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOutRows / 2; ++i) {
    const int of_row = 2 * i + lane / 16, chunk = lane % 16;
    const uint4 values = hopper::load_four(place(of_row, chunk));
    if (of_row < num_rows) {
      const std::int64_t to = static_cast<std::int64_t>(row + of_row) * gemm.columns + column;
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(gemm.out) + to + chunk * 8) = values;
    }
  }
  __syncwarp();
}

// Writes or adds a warp's 16 x 128 sums to fp32, without waiting until it is done: a thread's own
// additions would hold up the next tile's products for as long as the memory takes.
__device__ inline void write_weights(const Sums& total, hopper::Address staging,
                                     const CUtensorMap& map, int column, int row, bool adds) {
  constexpr int kColumns = kOutColumns<float>, kCopies = 2;  // more at once took longer
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kBlock; first += kCopies * kColumns) {
    hopper::wait_for_reads();  // of what was there before
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kCopies * kColumns / 2; i += 2) {
      const int to_row = lane / 4 + i / 2 % 2 * 8, to_column = i / 4 * 8 + lane % 4 * 2;
      const int byte = to_row * kOutPitch + to_column % kColumns * 4;
      hopper::store_pair(staging + to_column / kColumns * kOutBytes + (byte ^ to_row % 8 * 16),
                         total[first / 2 + i], total[first / 2 + i + 1]);
    }
    hopper::show_to_copies();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        const int x = column + first + copy * kColumns;
        const hopper::Address from = staging + copy * kOutBytes;
        if (adds) {  // no other warp adds there
          hopper::add_box(map, x, row, from);
        } else {
          hopper::store_box(map, x, row, from);
        }
      }
      hopper::end_stores();
    }
  }
}

// Two warpgroups multiply, each 64 rows: one promotes what it has while the other's products go on.
template <bool kIsWeights>
__device__ void multiply_tiles(const GemmMaps& maps, const Gemm& gemm, const Layout& shared,
                               int cta) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own_row = warp * 16;  // of the tile: this warp's first one
  const int num_blocks = gemm.depth / kBlock;
  Stage stage;
  Tile tile;
  for (int index = cluster_index(); find_tile(gemm, index, tile); index += num_clusters()) {
    const int first = first_step<kIsWeights>(tile), end = end_step<kIsWeights>(tile, gemm);
    const int row = first_row<kIsWeights>(tile, cta) + own_row;
    const int own_scale = own_row + lane / 4 + row % 4;
    const float* scales_b = nullptr;  // of the two halves: of weights
    if constexpr (!kIsWeights) {
      scales_b =
          gemm.scales_b +
          static_cast<std::int64_t>(tile.expert * gemm.columns + tile.column) / kBlock * num_blocks;
    }
    Sums total[kHalves], product;
#pragma unroll
    for (Sums& sums : total) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
    for (int step = first; step < end; ++step, stage.advance()) {
      float of_half[kHalves];
      if constexpr (!kIsWeights) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          of_half[half] = __ldg(scales_b + half * num_blocks + step);
        }
      }
      const int s = stage.index;
      hopper::wait(shared.full(s), stage.parity);
      const hopper::Address scales_a = shared.scales_a(s) + own_scale * 4;
      const float of_rows[2] = {hopper::load(scales_a), hopper::load(scales_a + 8 * 4)};
      const auto release = [&] {
        if (lane < kClusterCtas) hopper::arrive_at(shared.empty(s), lane);
      };
      const std::uint32_t a = hopper::describe(shared.a(s) + own_row / 64 * 64 * kBlock);
      const std::uint32_t b = hopper::describe(shared.b(s));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        hopper::begin_products();
#pragma unroll
        for (int k = 0; k < kBlock / 32; ++k) {
          // The other half is kBlock rows further, and k a multiple of 32 bytes.
          hopper::multiply(product, a + k * 2, b + half * (kBlock * kBlock / 16) + k * 2, k > 0);
        }
        hopper::end_products();
        if constexpr (kIsWeights) {
          const hopper::Address columns = shared.scales_b(s) + (half * kBlock + lane % 4 * 2) * 4;
          ColumnScales own;
#pragma unroll
          for (int pair = 0; pair < ColumnScales::kPairs; ++pair) own.load(columns, pair);
          hopper::wait_for_products(product);
          promote(total[half], product, of_rows, own, columns);
        } else {
          hopper::wait_for_products(product);
          if (half == kHalves - 1) release();
          const float scales[2] = {of_rows[0] * of_half[half], of_rows[1] * of_half[half]};
          promote(total[half], product, scales);
        }
      }
      if constexpr (kIsWeights) {
        __syncwarp();  // all its lanes have read the scales
        release();
      }
    }
    const auto write = [&](const Sums& sums, int half) {
      if constexpr (kIsWeights) {
        if (row >= gemm.rows || (first == end && gemm.adds)) return;
        write_weights(sums, shared.out(warp), maps.out, tile.column + half * kBlock,
                      tile.expert * gemm.rows + row, gemm.adds);
      } else {
        if (half == 0) {
          hopper::wait_for_reads();  // of the last tile's rows
          __syncwarp();
        }
        write_rows(sums, shared.out(warp) + half * (kWarpOut / kHalves), maps.out, gemm,
                   tile.column + half * kBlock, row, tile.end_row - row);
      }
    };
    static_assert(kHalves == 2);  // a loop would put the sums into local memory
    write(total[0], 0);
    write(total[1], 1);
  }
  hopper::wait_for_reads();  // the memory goes with the CTA
}

template <bool kIsWeights>
__device__ void run_gemm(const GemmMaps& maps, const Gemm& gemm, GemmShared& memory) {
  const Layout shared{hopper::kept_address_of(&memory)};
  const int cta = hopper::cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      hopper::init_barrier(shared.full(s), 1);
      hopper::init_barrier(shared.empty(s), kClusterCtas * kMultipliers * 4);
    }
    hopper::fence_barriers();
  }
  hopper::cluster_barrier();
  if (threadIdx.x >= kMultipliers * 128) {
    hopper::lower_registers<40>();
    if (threadIdx.x / 32 == kMultipliers * 4) load_tiles<kIsWeights>(maps, gemm, shared, cta);
  } else {
    hopper::raise_registers<232>();
    multiply_tiles<kIsWeights>(maps, gemm, shared, cta);
  }
  hopper::cluster_barrier();  // a CTA's memory exists until the other one has done with it
}

}  // namespace ncclep::experts
