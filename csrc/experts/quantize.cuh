// What is quantised: rows as they are, before or after they cross, SwiGLU's results and their
// gradients, and weights.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "experts/fp8_tile.cuh"

namespace ncclep::experts {

// Which tile a CTA quantises: those of a block of rows come one after the other.
struct TileAt {
  __device__ explicit TileAt(int columns)
      : block(static_cast<int>(blockIdx.x) / (columns / kBlock)),
        column(static_cast<int>(blockIdx.x) % (columns / kBlock) * kBlock) {}
  int block, column;
};

struct Rows {
  const __nv_bfloat16* values;  // [num_rows, columns]
  const std::int32_t* offsets;  // [num_experts + 1]
  int num_experts;
};

// SwiGLU of [num_rows, 2 columns], gates before values, times a probability for each row.
struct Swiglu {
  const __nv_bfloat16* inputs;
  const float* probs;          // [num_rows]
  const __nv_bfloat16* grads;  // [num_rows, columns], of the result; backward only
  float* prob_grads;           // [columns / 128, probs_pitch]: parts of sums; backward only
  const std::int32_t* offsets;
  int num_experts, columns, probs_pitch;
};

// Four bf16 from one load; zeros where `is_valid` does not hold.
__device__ inline uint2 load_four(const __nv_bfloat16* from, bool is_valid) {
  return is_valid ? *reinterpret_cast<const uint2*>(from) : uint2{0, 0};
}
__device__ inline float value_of(const uint2& four, int i) {
  const std::uint32_t pair = i < 2 ? four.x : four.y;
  return i % 2 ? high(pair) : low(pair);
}
__device__ inline uint2 rounded(const float (&values)[kColumnsOfLane]) {
  return uint2{hopper::to_bf16(values[0], values[1]), hopper::to_bf16(values[2], values[3])};
}

// Calls `fill(r, row, is_valid)` for each of this thread's rows of a block, which may lie after the
// block's last one.
template <typename Fill>
__device__ inline void for_rows(const RowBlock& block, Fill&& fill) {
  const Part part;
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    fill(r, static_cast<std::int64_t>(block.first_row) + part.row + r,
         part.row + r < block.num_rows);
  }
}

// The thread's rows of a block of bf16 [rows, pitch]; `first`: its first column, in row 0.
__device__ inline void load_rows(Values& values, const RowBlock& block, const __nv_bfloat16* first,
                                 int pitch) {
  for_rows(block, [&](int r, std::int64_t row, bool is_valid) {
    values[r] = load_four(first + row * pitch, is_valid);
  });
}

__device__ inline void quantize_rows(const Rows& from, const Fp8Rows& to, TileShared& shared) {
  const TileAt at(to.columns);
  const RowBlock block = block_of(from.offsets, from.num_experts, at.block);
  if (block.number < 0) return;
  Values values;
  load_rows(values, block, from.values + at.column + Part().column, to.columns);
  quantize(values, to, block, at.column, shared);
}

// Rows that cross between ranks: values in FP8, their inverse scales, and zeros up to `pitch`
// bytes.
struct PackedRows {
  std::uint8_t* bytes;  // [num_rows, pitch]
  int columns, pitch;

  __device__ float* scales(std::int64_t row) const {
    return reinterpret_cast<float*>(bytes + row * pitch + columns);
  }
};

// Packs a block of `from`, bf16 [num_rows, to.columns].
__device__ inline void pack_rows(const __nv_bfloat16* from, std::int64_t num_rows,
                                 const PackedRows& to, bool is_power_of_two) {
  const TileAt at(to.columns);
  const std::int64_t left = num_rows - std::int64_t{at.block} * kBlock;
  const RowBlock block{at.block * kBlock, static_cast<int>(min(left, std::int64_t{kBlock})),
                       at.block};
  Values values;
  load_rows(values, block, from + at.column + Part().column, to.columns);
  const int floats = to.pitch / 4;  // of a row, its values included
  float* const scales = to.scales(block.first_row);
  float scale[kRowsOfWarp];
  find_rows(values, is_power_of_two, block.num_rows, scales + at.column / kBlock, floats, scale);
  write_fp8_rows(values, scale,
                 to.bytes + static_cast<std::int64_t>(block.first_row) * to.pitch + at.column,
                 to.pitch, block.num_rows);
  const int row = threadIdx.x;
  if (at.column == 0 && row < block.num_rows) {
    for (int i = to.columns / kBlock; i < floats - to.columns / 4; ++i) {
      scales[std::int64_t{row} * floats + i] = 0;
    }
  }
}

// What an e4m3 code stands for.
__device__ inline float from_fp8(std::uint32_t code) {
  constexpr float kExponents = 1.329227995784916e36f;  // 2^120: fp32 has 120 smaller ones
  const float value = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * kExponents;
  return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : value;
}

// Copies the rows' scales to where products look for them, and quantises the values again by
// columns, rounded to bf16 first.  `to`: without rows.
__device__ inline void unpack_rows(const PackedRows& from, const std::int32_t* offsets,
                                   int num_experts, const Fp8Rows& to, TileShared& shared) {
  const TileAt at(to.columns);
  const RowBlock block = block_of(offsets, num_experts, at.block);
  if (block.number < 0) return;
  const std::uint8_t* first = from.bytes + at.column + Part().column;
  Values values;
  for_rows(block, [&](int r, std::int64_t row, bool is_valid) {
    const float scale = is_valid ? from.scales(row)[at.column / kBlock] : 0;
    if (to.scales != nullptr && is_valid && threadIdx.x % 32 == 0) {
      to.scales[std::int64_t{at.column / kBlock} * to.scales_pitch + row] = scale;
    }
    const bool is_needed = is_valid && to.transposed != nullptr;
    const std::uint32_t codes =
        is_needed ? *reinterpret_cast<const std::uint32_t*>(first + row * from.pitch) : 0;
    float results[kColumnsOfLane];
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) results[c] = from_fp8(codes >> 8 * c & 0xff) * scale;
    values[r] = rounded(results);
  });
  quantize(values, to, block, at.column, shared);
}

__device__ inline float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// The result, rounded to bf16 first, as if it had been stored in between.
__device__ inline void quantize_swiglu(const Swiglu& from, const Fp8Rows& to, TileShared& shared) {
  const TileAt at(from.columns);
  const RowBlock block = block_of(from.offsets, from.num_experts, at.block);
  if (block.number < 0) return;
  const __nv_bfloat16* first = from.inputs + at.column + Part().column;
  Values values;
  for_rows(block, [&](int r, std::int64_t row, bool is_valid) {
    const uint2 gate = load_four(first + row * 2 * from.columns, is_valid);
    const uint2 up = load_four(first + (row * 2 + 1) * from.columns, is_valid);
    const float prob = is_valid ? from.probs[row] : 0;
    float results[kColumnsOfLane];
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const float g = value_of(gate, c);
      results[c] = g * sigmoid(g) * value_of(up, c) * prob;
    }
    values[r] = rounded(results);
  });
  quantize(values, to, block, at.column, shared);
}

// The gradients of the inputs, rounded likewise: two tiles, of the gates and of the values,
// [num_rows, 2 columns].
__device__ inline void quantize_swiglu_grads(const Swiglu& from, const Fp8Rows& to,
                                             TileShared& shared) {
  const TileAt at(from.columns);
  const RowBlock block = block_of(from.offsets, from.num_experts, at.block);
  if (block.number < 0) return;
  const __nv_bfloat16* first = from.inputs + at.column + Part().column;
  const __nv_bfloat16* grads = from.grads + at.column + Part().column;
  Values of_gates, of_values;
  float of_probs[kRowsOfWarp];
  for_rows(block, [&](int r, std::int64_t row, bool is_valid) {
    const uint2 gate = load_four(first + row * 2 * from.columns, is_valid);
    const uint2 up = load_four(first + (row * 2 + 1) * from.columns, is_valid);
    const uint2 grad = load_four(grads + row * from.columns, is_valid);
    const float prob = is_valid ? from.probs[row] : 0;
    float to_gate[kColumnsOfLane], to_value[kColumnsOfLane];
    of_probs[r] = 0;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const float g = value_of(gate, c), s = sigmoid(g), silu = g * s;
      const float of_result = value_of(grad, c) * prob;
      to_gate[c] = of_result * value_of(up, c) * (s + silu * (1 - s));
      to_value[c] = of_result * silu;
      of_probs[r] += value_of(grad, c) * silu * value_of(up, c);
    }
    of_gates[r] = rounded(to_gate);
    of_values[r] = rounded(to_value);
  });
  const float own = join_lanes(of_probs, [](float a, float b) { return a + b; });
  const int lane = threadIdx.x % 32, row = Part().row + lane / (32 / kRowsOfWarp);
  if (lane % (32 / kRowsOfWarp) == 0 && row < block.num_rows) {
    from.prob_grads[std::int64_t{at.column / kBlock} * from.probs_pitch + block.first_row + row] =
        own;
  }
  quantize(of_gates, to, block, at.column, shared);
  quantize(of_values, to, block, at.column + from.columns, shared);
}

// Weights [num_experts * rows, columns] and where they go.
struct Weights {
  const __nv_bfloat16* values;
  std::uint8_t *fp8, *transposed;     // like `values`, and [num_experts, columns, rows]
  float *scales, *scales_transposed;  // [num_experts, rows / 128, columns / 128], and transposed
  int rows, columns;
  bool is_power_of_two;
};

// A block of 128 x 128 has one scale.
__device__ inline void quantize_weights(const Weights& job, TileShared& shared) {
  const TileAt at(job.columns);
  const int rows_of_expert = job.rows / kBlock, expert = at.block / rows_of_expert;
  const int block = at.block % rows_of_expert, num_columns = job.columns / kBlock;
  const std::int64_t of_expert = static_cast<std::int64_t>(expert) * job.rows * job.columns;
  const std::int64_t first = static_cast<std::int64_t>(at.block) * kBlock * job.columns + at.column;
  Values values;
  load_rows(values, {at.block * kBlock, kBlock, at.block}, job.values + at.column + Part().column,
            job.columns);
  const uint2 amax = largest_of_columns(values);
  std::uint32_t own[1]{hopper::larger(amax.x, amax.y)};
  shared.amax[threadIdx.x / 32][threadIdx.x % 32].x = join_lanes(own, hopper::larger);
  __syncthreads();
  std::uint32_t most = 0;
#pragma unroll
  for (const auto& of_warp : shared.amax) most = hopper::larger(most, of_warp[0].x);
  const float one = scale_for(fmaxf(low(most), high(most)), job.is_power_of_two);
  float of_rows[kRowsOfWarp], of_columns[kColumnsOfLane];
#pragma unroll
  for (float& scale : of_rows) scale = one;
#pragma unroll
  for (float& scale : of_columns) scale = one;
  if (threadIdx.x == 0) {
    const int scales = expert * rows_of_expert * num_columns;
    job.scales[scales + block * num_columns + at.column / kBlock] = __frcp_rn(one);
    job.scales_transposed[scales + at.column / kBlock * rows_of_expert + block] = __frcp_rn(one);
  }
  write_fp8_rows(values, of_rows, job.fp8 + first, job.columns, kBlock);
  write_fp8_columns(
      values, of_columns, shared,
      job.transposed + of_expert + static_cast<std::int64_t>(at.column) * job.rows + block * kBlock,
      job.rows);
}

}  // namespace ncclep::experts
