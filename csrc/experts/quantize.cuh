// What is quantised: rows as they are, SwiGLU's results and their gradients, and weights.
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

// Eight bf16 from one load.
struct Eight {
  uint4 bits;
  __device__ float operator[](int i) const {
    const unsigned int word = i < 2 ? bits.x : i < 4 ? bits.y : i < 6 ? bits.z : bits.w;
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
};
// Zeros where `is_valid` does not hold.
__device__ inline Eight load_eight(const __nv_bfloat16* from, bool is_valid) {
  return {is_valid ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0}};
}

// Calls `fill(r, row, is_valid, values[r])` for each of this thread's rows of a block, which may
// lie after the block's last one.
template <typename Fill>
__device__ inline void fill_rows(Values& values, const RowBlock& block, Fill&& fill) {
  const Part part;
#pragma unroll
  for (int r = 0; r < kPart; ++r) {
    fill(r, static_cast<std::int64_t>(block.first_row) + part.row + r,
         part.row + r < block.num_rows, values[r]);
  }
}

// The thread's rows of a block of bf16 [rows, pitch]; `first`: its first column, in row 0.
__device__ inline void load_rows(Values& values, const RowBlock& block, const __nv_bfloat16* first,
                                 int pitch) {
  fill_rows(values, block, [&](int, std::int64_t row, bool is_valid, float (&to_row)[kPart]) {
    const Eight eight = load_eight(first + row * pitch, is_valid);
#pragma unroll
    for (int c = 0; c < kPart; ++c) to_row[c] = eight[c];
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

__device__ inline float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// The result.
__device__ inline void quantize_swiglu(const Swiglu& from, const Fp8Rows& to, TileShared& shared) {
  const TileAt at(from.columns);
  const RowBlock block = block_of(from.offsets, from.num_experts, at.block);
  if (block.number < 0) return;
  const __nv_bfloat16* first = from.inputs + at.column + Part().column;
  Values values;
  fill_rows(values, block, [&](int, std::int64_t row, bool is_valid, float (&to_row)[kPart]) {
    const Eight gate = load_eight(first + row * 2 * from.columns, is_valid);
    const Eight up = load_eight(first + (row * 2 + 1) * from.columns, is_valid);
    const float prob = is_valid ? from.probs[row] : 0;
#pragma unroll
    for (int c = 0; c < kPart; ++c) to_row[c] = gate[c] * sigmoid(gate[c]) * up[c] * prob;
  });
  quantize(values, to, block, at.column, shared);
}

// The gradients of the inputs: two tiles, of the gates and of the values, [num_rows, 2 columns].
__device__ inline void quantize_swiglu_grads(const Swiglu& from, const Fp8Rows& to,
                                             TileShared& shared) {
  const TileAt at(from.columns);
  const RowBlock block = block_of(from.offsets, from.num_experts, at.block);
  if (block.number < 0) return;
  const __nv_bfloat16* first = from.inputs + at.column + Part().column;
  const __nv_bfloat16* grads = from.grads + at.column + Part().column;
  float* prob_grads = from.prob_grads + std::int64_t{at.column / kBlock} * from.probs_pitch;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {  // again from the caches: both do not fit into registers
    Values values;
    fill_rows(values, block, [&](int r, std::int64_t row, bool is_valid, float (&to_row)[kPart]) {
      const Eight gate = load_eight(first + row * 2 * from.columns, is_valid);
      const Eight up = load_eight(first + (row * 2 + 1) * from.columns, is_valid);
      const Eight grad = load_eight(grads + row * from.columns, is_valid);
      const float prob = is_valid ? from.probs[row] : 0;
      float of_prob = 0;
#pragma unroll
      for (int c = 0; c < kPart; ++c) {
        const float s = sigmoid(gate[c]), silu = gate[c] * s, of_result = grad[c] * prob;
        if (half == 0) {
          to_row[c] = of_result * up[c] * (s + silu * (1 - s));
          of_prob += grad[c] * silu * up[c];
        } else {
          to_row[c] = of_result * silu;
        }
      }
      if (half == 0) {
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) {
          of_prob += __shfl_xor_sync(~0u, of_prob, lanes);
        }
        if (static_cast<int>(threadIdx.x % 16) == r && is_valid) prob_grads[row] = of_prob;
      }
    });
    quantize(values, to, block, at.column + half * from.columns, shared);
  }
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
  float amax[kPart];
  find_columns(values, shared, amax);
  float most = 0;
#pragma unroll
  for (int c = 0; c < kPart; ++c) most = fmaxf(most, amax[c]);
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
  }
  float scale[kPart];
#pragma unroll
  for (int i = 0; i < kPart; ++i) scale[i] = scale_for(most, job.is_power_of_two);
  if (threadIdx.x == 0) {
    const int scales = expert * rows_of_expert * num_columns;
    job.scales[scales + block * num_columns + at.column / kBlock] = __frcp_rn(scale[0]);
    job.scales_transposed[scales + at.column / kBlock * rows_of_expert + block] =
        __frcp_rn(scale[0]);
  }
  write_fp8_rows(values, scale, job.fp8 + first, job.columns, kBlock);
  write_fp8_columns(
      values, scale, shared,
      job.transposed + of_expert + static_cast<std::int64_t>(at.column) * job.rows + block * kBlock,
      job.rows);
}

}  // namespace ncclep::experts
