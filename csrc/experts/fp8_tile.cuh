// One tile of 128 x 128 values becomes FP8: by rows, and transposed, by columns.
//
// 256 threads, each with eight rows and eight columns of the tile.  A block of 128 values shares
// a scale: the largest one becomes at most 448, the largest e4m3.  Which values become what is
// TransformerEngine's rule (docs/contract.md), so that either side can take the other's rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "experts/hopper.cuh"
#include "experts/tiles.cuh"

namespace ncclep::experts {

constexpr int kQuantizeThreads = 256;
constexpr int kPart = 8;  // rows and columns of a thread
constexpr float kLargest = 448;

using Values = float[kPart][kPart];  // by row

struct TileShared {
  float amax[kQuantizeThreads / 32][kBlock];
  float scales[kBlock];
  // Bytes of column c, rows 8 g to 8 g + 7, are at [c][g ^ c / 8 % 16]: no bank is needed twice.
  uint2 transposed[kBlock][kBlock / kPart];
};

// What values are multiplied by; `tiny`: what a block gets whose scale fp32 cannot hold.
__device__ inline float scale_for(float amax, bool is_power_of_two) {
  constexpr float kMostOfBf16 = 3.38953139e38f;
  if (!(amax > 0) || isinf(amax)) return 1;
  float scale = __fdiv_rn(kLargest, amax);
  if (isinf(scale)) scale = kMostOfBf16;
  return is_power_of_two ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

// The tile's values that this thread has.
struct Part {
  int row = threadIdx.x / 16 * kPart, column = threadIdx.x % 16 * kPart;
};

// The largest magnitude of each of the thread's rows, in the tile.
__device__ inline void find_rows(const Values& values, float (&amax)[kPart]) {
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
    amax[r] = 0;
#pragma unroll
    for (int c = 0; c < kPart; ++c) amax[r] = fmaxf(amax[r], fabsf(values[r][c]));
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) {
      amax[r] = fmaxf(amax[r], __shfl_xor_sync(~0u, amax[r], lanes));
    }
  }
}

// The same for its columns.  Called by all threads of the CTA.
__device__ inline void find_columns(const Values& values, TileShared& shared,
                                    float (&amax)[kPart]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kPart; ++c) {
    amax[c] = 0;
#pragma unroll
    for (int r = 0; r < kPart; ++r) amax[c] = fmaxf(amax[c], fabsf(values[r][c]));
    amax[c] = fmaxf(amax[c], __shfl_xor_sync(~0u, amax[c], 16));
    if (lane < 16) shared.amax[warp][lane * kPart + c] = amax[c];
  }
  __syncthreads();
  if (threadIdx.x < kBlock) {
    float most = 0;
#pragma unroll
    for (int w = 0; w < kQuantizeThreads / 32; ++w) {
      most = fmaxf(most, shared.amax[w][threadIdx.x]);
    }
    shared.scales[threadIdx.x] = most;
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kPart; ++c) amax[c] = shared.scales[Part().column + c];
}

// Writes the tile's rows from `to` on, if they are among the first `num_rows`.
__device__ inline void write_fp8_rows(const Values& values, const float (&scale)[kPart],
                                      std::uint8_t* to, std::int64_t pitch, int num_rows) {
  const Part part;
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
    const float (&v)[kPart] = values[r];
    const float s = scale[r];
    const uint2 bytes{hopper::to_fp8(v[0] * s, v[1] * s, v[2] * s, v[3] * s),
                      hopper::to_fp8(v[4] * s, v[5] * s, v[6] * s, v[7] * s)};
    if (part.row + r < num_rows) {
      *reinterpret_cast<uint2*>(to + (part.row + r) * pitch + part.column) = bytes;
    }
  }
}

// Writes the whole tile transposed: its columns are rows of `to`.  Called by all threads.
__device__ inline void write_fp8_columns(const Values& v, const float (&scale)[kPart],
                                         TileShared& shared, std::uint8_t* to, std::int64_t pitch) {
  const Part part;
#pragma unroll
  for (int c = 0; c < kPart; ++c) {
    const float s = scale[c];
    const int column = part.column + c;
    shared.transposed[column][part.row / kPart ^ column / kPart % 16] =
        uint2{hopper::to_fp8(v[0][c] * s, v[1][c] * s, v[2][c] * s, v[3][c] * s),
              hopper::to_fp8(v[4][c] * s, v[5][c] * s, v[6][c] * s, v[7][c] * s)};
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBlock * 8 / kQuantizeThreads; ++i) {
    const int column = i * kQuantizeThreads / 8 + threadIdx.x / 8, piece = threadIdx.x % 8 * 2;
    const uint2* bytes = shared.transposed[column];
    const int swizzle = column / kPart % 16;
    const uint2 first = bytes[piece ^ swizzle], second = bytes[(piece + 1) ^ swizzle];
    *reinterpret_cast<uint4*>(to + column * pitch + piece * 8) =
        uint4{first.x, first.y, second.x, second.y};
  }
  __syncthreads();  // another tile may follow
}

// Where a matrix of rows goes.
struct Fp8Rows {
  std::uint8_t* rows;        // [num_rows, columns], or none
  float* scales;             // [columns / 128, scales_pitch]
  std::uint8_t* transposed;  // [columns, blocks_pitch * 128], or none; an expert begins a block
  float* scales_transposed;  // [num_blocks, columns]
  int columns, scales_pitch, blocks_pitch;
  bool is_power_of_two;
};

// A block of an expert's rows, for a CTA.
struct RowBlock {
  int first_row, num_rows;  // of the block
  int number;               // among all blocks; -1: there is none
};

// Block `number` of all experts' rows.
__device__ inline RowBlock block_of(const std::int32_t* offsets, int num_experts, int number) {
  int first = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    const int begin = offsets[expert], end = offsets[expert + 1];
    const int blocks = (end - begin + kBlock - 1) / kBlock;
    if (number < first + blocks) {
      const int row = begin + (number - first) * kBlock;
      return {row, min(kBlock, end - row), number};
    }
    first += blocks;
  }
  return {0, 0, -1};
}

// Quantises the tile at `block` and `column`; values of rows beyond the block are zeros.
__device__ inline void quantize(const Values& values, const Fp8Rows& to, const RowBlock& block,
                                int column, TileShared& shared) {
  const Part part;
  float scale[kPart];
  if (to.rows != nullptr) {
    find_rows(values, scale);
    float* scales = to.scales + std::int64_t{column / kBlock} * to.scales_pitch + block.first_row;
#pragma unroll
    for (int r = 0; r < kPart; ++r) {
      scale[r] = scale_for(scale[r], to.is_power_of_two);
      if (static_cast<int>(threadIdx.x % 16) == r && part.row + r < block.num_rows) {
        scales[part.row + r] = __frcp_rn(scale[r]);
      }
    }
    write_fp8_rows(values, scale,
                   to.rows + static_cast<std::int64_t>(block.first_row) * to.columns + column,
                   to.columns, block.num_rows);
  }
  if (to.transposed != nullptr) {
    find_columns(values, shared, scale);
    float* scales = to.scales_transposed + static_cast<std::int64_t>(block.number) * to.columns;
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      scale[c] = scale_for(scale[c], to.is_power_of_two);
      if (part.row == 0) scales[column + part.column + c] = __frcp_rn(scale[c]);
    }
    const std::int64_t pitch = std::int64_t{to.blocks_pitch} * kBlock;
    write_fp8_columns(values, scale, shared,
                      to.transposed + column * pitch + std::int64_t{block.number} * kBlock, pitch);
  }
}

}  // namespace ncclep::experts
