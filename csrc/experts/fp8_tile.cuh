// One tile of 128 x 128 bf16 values becomes FP8: by rows, and transposed, by columns.
//
// 16 warps, each with eight rows of the tile, of which a lane has four columns.  A block of 128
// values shares a scale: the largest one becomes at most 448, the largest e4m3.  Which values
// become what is TransformerEngine's rule (of its Float8BlockScaling), so that either side can take
// the other's rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "experts/hopper.cuh"
#include "experts/tiles.cuh"

namespace ncclep::experts {

constexpr int kRowsOfWarp = 8, kColumnsOfLane = 4;
constexpr int kQuantizeWarps = kBlock / kRowsOfWarp;
constexpr int kQuantizeThreads = kQuantizeWarps * 32;
constexpr float kLargest = 448;

using Values = uint2[kRowsOfWarp];  // a thread's: pairs of bf16

// Where the tile's values that this thread has begin.
struct Part {
  int row = threadIdx.x / 32 * kRowsOfWarp, column = threadIdx.x % 32 * kColumnsOfLane;
};

struct __align__(16) TileShared {
  uint2 amax[kQuantizeWarps][32];  // of each warp's rows, pairs of bf16
  float scales[kBlock];
  // Bytes of column c, rows 8 g to 8 g + 7, are at [c][g ^ c / 4 % 16]: no bank is needed twice.
  uint2 transposed[kBlock][kBlock / kRowsOfWarp];
};

__device__ inline float low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// What values are multiplied by.  Zeros, and blocks with an infinity, stay as they are.
__device__ inline float scale_for(float amax, bool is_power_of_two) {
  constexpr float kMostOfBf16 = 3.38953139e38f;
  if (!(amax > 0) || isinf(amax)) return 1;
  float scale = __fdiv_rn(kLargest, amax);
  if (isinf(scale)) scale = kMostOfBf16;  // of a subnormal one
  return is_power_of_two ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

// Joins each of `values` over the warp's lanes.  The lane gets number lane / (32 / kCount) of them.
template <int kCount, typename T, typename Join>
__device__ T join_lanes(T (&values)[kCount], Join join) {
  int lanes = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, lanes /= 2) {
    const bool is_upper = threadIdx.x & lanes;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T given = is_upper ? values[i] : values[i + half];
      const T kept = is_upper ? values[i + half] : values[i];
      values[i] = join(kept, __shfl_xor_sync(~0u, given, lanes));
    }
  }
  for (; lanes > 0; lanes /= 2) {
    values[0] = join(values[0], __shfl_xor_sync(~0u, values[0], lanes));
  }
  return values[0];
}

// The warp's rows: their scales, and the inverse ones from `inverse` on, `pitch` apart, of
// `num_rows` of the tile.
__device__ inline void find_rows(const Values& values, bool is_power_of_two, int num_rows,
                                 float* inverse, std::int64_t pitch, float (&scale)[kRowsOfWarp]) {
  std::uint32_t amax[kRowsOfWarp / 2];  // of two rows
#pragma unroll
  for (int i = 0; i < kRowsOfWarp / 2; ++i) {
    const std::uint32_t even = hopper::larger(values[2 * i].x, values[2 * i].y);
    const std::uint32_t odd = hopper::larger(values[2 * i + 1].x, values[2 * i + 1].y);
    amax[i] = hopper::larger(odd << 16 | (even & 0xffff), (odd & 0xffff0000u) | even >> 16);
  }
  const std::uint32_t own = join_lanes(amax, hopper::larger);
  const int lane = threadIdx.x % 32, row = lane / 8 * 2 + lane % 2;
  const float own_scale = scale_for(row % 2 ? high(own) : low(own), is_power_of_two);
  if (lane % 8 < 2 && Part().row + row < num_rows) {
    inverse[(Part().row + row) * pitch] = __frcp_rn(own_scale);
  }
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    scale[r] = __shfl_sync(~0u, own_scale, r / 2 * 8 + r % 2);
  }
}

// The larger magnitudes of the thread's four columns.
__device__ inline uint2 largest_of_columns(const Values& values) {
  uint2 amax{0, 0};
#pragma unroll
  for (const uint2& row : values) {
    amax = uint2{hopper::larger(amax.x, row.x), hopper::larger(amax.y, row.y)};
  }
  return amax;
}

// The tile's columns: their scales, and the inverse ones from `inverse` on.  Called by all threads.
__device__ inline void find_columns(const Values& values, bool is_power_of_two, float* inverse,
                                    TileShared& shared, float (&scale)[kColumnsOfLane]) {
  shared.amax[threadIdx.x / 32][threadIdx.x % 32] = largest_of_columns(values);
  __syncthreads();
  if (threadIdx.x < kBlock / 2) {
    std::uint32_t most = 0;  // of two columns
#pragma unroll
    for (const auto& of_warp : shared.amax) {
      most = hopper::larger(most, reinterpret_cast<const std::uint32_t*>(of_warp)[threadIdx.x]);
    }
    const float2 scales{scale_for(low(most), is_power_of_two),
                        scale_for(high(most), is_power_of_two)};
    reinterpret_cast<float2*>(shared.scales)[threadIdx.x] = scales;
    reinterpret_cast<float2*>(inverse)[threadIdx.x] =
        float2{__frcp_rn(scales.x), __frcp_rn(scales.y)};
  }
  __syncthreads();
  const float4 own = reinterpret_cast<const float4*>(shared.scales)[threadIdx.x % 32];
  scale[0] = own.x, scale[1] = own.y, scale[2] = own.z, scale[3] = own.w;
}

// Writes the tile's rows from `to` on, if they are among the first `num_rows`.
__device__ inline void write_fp8_rows(const Values& values, const float (&scale)[kRowsOfWarp],
                                      std::uint8_t* to, std::int64_t pitch, int num_rows) {
  const Part part;
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const uint2 v = values[r];
    const float s = scale[r];
    const std::uint32_t bytes =
        hopper::to_fp8(low(v.x) * s, high(v.x) * s, low(v.y) * s, high(v.y) * s);
    if (part.row + r < num_rows) {
      *reinterpret_cast<std::uint32_t*>(to + (part.row + r) * pitch + part.column) = bytes;
    }
  }
}

// Writes the whole tile transposed: its columns are rows of `to`.  Called by all threads.
__device__ inline void write_fp8_columns(const Values& v, const float (&scale)[kColumnsOfLane],
                                         TileShared& shared, std::uint8_t* to, std::int64_t pitch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) {
    const auto value = [&](int row) {
      const std::uint32_t pair = c < 2 ? v[row].x : v[row].y;
      return (c % 2 ? high(pair) : low(pair)) * scale[c];
    };
    shared.transposed[lane * kColumnsOfLane + c][warp ^ lane % 16] =
        uint2{hopper::to_fp8(value(0), value(1), value(2), value(3)),
              hopper::to_fp8(value(4), value(5), value(6), value(7))};
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBlock * kBlock / 16 / kQuantizeThreads; ++i) {
    const int column = i * kQuantizeThreads / 8 + threadIdx.x / 8, piece = threadIdx.x % 8;
    const int swizzle = column / kColumnsOfLane % 16;
    uint4 bytes = reinterpret_cast<const uint4*>(shared.transposed[column])[piece ^ swizzle / 2];
    if (swizzle % 2) bytes = uint4{bytes.z, bytes.w, bytes.x, bytes.y};
    *reinterpret_cast<uint4*>(to + column * pitch + piece * 16) = bytes;
  }
  __syncthreads();  // another tile may follow
}

// Where a matrix of rows goes.
struct Fp8Rows {
  std::uint8_t* rows;        // [num_rows, columns], `pitch` bytes apart, or none
  float* scales;             // [columns / 128, scales_pitch]
  std::uint8_t* transposed;  // [num_blocks, columns, 128], or none; an expert begins a block
  float* scales_transposed;  // [num_blocks, columns]
  int columns, pitch, scales_pitch, num_blocks;
  bool is_power_of_two;
};

// A block of an expert's rows, for a CTA.
struct RowBlock {
  int first_row, num_rows;  // of the block
  int number;               // among all blocks; -1: there is none
};

// Block `number` of all experts' rows.  Called by whole warps, whose lanes look at an expert each.
__device__ inline RowBlock block_of(const std::int32_t* offsets, int num_experts, int number) {
  const int lane = threadIdx.x % 32;
  for (int first = 0, end_of_last = 0; first < num_experts; first += 32) {
    const int expert = min(first + lane, num_experts - 1);
    const int begin = offsets[expert], end = offsets[expert + 1];
    const int own = first + lane < num_experts ? (end - begin + kBlock - 1) / kBlock : 0;
    const int end_block = end_of_last + sum_to_lane(own);
    const unsigned int beyond = __ballot_sync(~0u, number < end_block);
    if (beyond != 0) {
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      const int row = begin + (number - (end_block - own)) * kBlock;
      const int num_rows = min(kBlock, end - row);
      return {__shfl_sync(~0u, row, found), __shfl_sync(~0u, num_rows, found), number};
    }
    end_of_last = __shfl_sync(~0u, end_block, 31);
  }
  return {0, 0, -1};
}

// Quantises the tile at `block` and `column`; values of rows beyond the block are zeros.
__device__ inline void quantize(const Values& values, const Fp8Rows& to, const RowBlock& block,
                                int column, TileShared& shared) {
  if (to.rows != nullptr) {
    float scale[kRowsOfWarp];
    find_rows(values, to.is_power_of_two, block.num_rows,
              to.scales + std::int64_t{column / kBlock} * to.scales_pitch + block.first_row, 1,
              scale);
    write_fp8_rows(values, scale,
                   to.rows + static_cast<std::int64_t>(block.first_row) * to.pitch + column,
                   to.pitch, block.num_rows);
  }
  if (to.transposed != nullptr) {
    float scale[kColumnsOfLane];
    find_columns(
        values, to.is_power_of_two,
        to.scales_transposed + static_cast<std::int64_t>(block.number) * to.columns + column,
        shared, scale);
    write_fp8_columns(values, scale, shared,
                      to.transposed + (std::int64_t{block.number} * to.columns + column) * kBlock,
                      kBlock);
  }
}

}  // namespace ncclep::experts
