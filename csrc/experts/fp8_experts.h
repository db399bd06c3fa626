// Grouped products of FP8 rows, and quantisation, for Hopper: what the host queues.
//
// The format is that of TransformerEngine's Float8BlockScaling: e4m3, one fp32 scale for 1 x 128
// values of a row or of a transposed row, and for 128 x 128 values of a weight.  Addresses are
// multiples of 16 bytes.  Expert g has the rows from offsets[g] up to offsets[g + 1].  Nothing here
// waits for the device, and the host does not read the offsets.
#pragma once

#include <cstdint>

namespace ncclep::fp8 {

constexpr int kBlock = 128;          // values that share a scale; of what products sum over
constexpr int kResultColumns = 256;  // columns of a product's result are a multiple of it
constexpr int kScalesPitch = 4;      // and a row of scales of this

// Blocks of rows that `num_experts` have at most, each expert beginning one of its own.
constexpr std::int64_t most_blocks(std::int64_t num_rows, std::int64_t num_experts) {
  return num_rows / kBlock + num_experts;
}

struct Experts {
  const std::int32_t* offsets;  // [num_experts + 1]
  int num_experts;
};

// Bytes of a row that crosses between ranks (megatron_ncclep/ops/packed_rows.py): its values, an
// fp32 inverse scale for each block of them, and zeros up to a multiple of 16.
constexpr std::int64_t packed_bytes(std::int64_t columns) {
  return (columns + columns / kBlock * 4 + 15) / 16 * 16;
}

// A matrix of rows in FP8, either or both ways.
struct Matrix {
  std::uint8_t* rows;        // [num_rows, columns], `pitch` bytes apart, or none
  float* scales;             // [columns / 128, scales_pitch]
  std::uint8_t* transposed;  // [num_blocks, columns, 128], or none; an expert begins a block
  float* scales_transposed;  // [num_blocks, columns]
  std::int64_t num_rows;
  int columns, pitch, scales_pitch, num_blocks;
};

// The inputs of SwiGLU, bf16 [num_rows, 2 * columns], gates before values.
struct Swiglu {
  const void* inputs;
  const float* probs;  // [num_rows]
  const void* grads;   // bf16 [num_rows, columns], of the result; backward only
  float* prob_grads;   // [columns / 128, probs_pitch]: parts of sums; backward only
  int columns, probs_pitch;
};

struct Weights {
  const void* values;                 // bf16 [num_experts, rows, columns]
  std::uint8_t *fp8, *transposed;     // the same, and [num_experts, columns, rows]
  float *scales, *scales_transposed;  // [num_experts, rows / 128, columns / 128], and transposed
  int num_experts, rows, columns;
};

// Whether scales are powers of two.
enum class Scales { kAny, kPowersOfTwo };

// `values`: bf16 [num_rows, columns].
void quantize_rows(const void* values, const Experts& experts, const Matrix& to, Scales scales,
                   std::uintptr_t stream);
// The same by rows alone, into packed rows.
void pack_rows(const void* values, std::int64_t num_rows, int columns, std::uint8_t* packed,
               Scales scales, std::uintptr_t stream);
// From packed rows of `to.columns` values: the scales of `to`, if it has a place for them, and the
// values quantised again by columns, if it has one for what is transposed.  `to`: without rows.
void unpack_rows(const std::uint8_t* packed, const Experts& experts, const Matrix& to,
                 Scales scales, std::uintptr_t stream);
// silu(gate) * value * probability, rounded to bf16 before it is quantised.
void quantize_swiglu(const Swiglu& from, const Experts& experts, const Matrix& to, Scales scales,
                     std::uintptr_t stream);
// The gradients of the inputs, `to`: [num_rows, 2 * columns].
void quantize_swiglu_gradients(const Swiglu& from, const Experts& experts, const Matrix& to,
                               Scales scales, std::uintptr_t stream);
void quantize_weights(const Weights& weights, Scales scales, std::uintptr_t stream);

// out[rows of g] = a[rows of g] @ b[g]^T: b [num_experts, columns, a.columns] with its scales, out
// bf16 [num_rows, columns].
void multiply_rows(const Matrix& a, const std::uint8_t* b, const float* scales_b,
                   const Experts& experts, int columns, void* out, std::uintptr_t stream);
// out[g] (+)= a[rows of g]^T @ b[rows of g], of what is transposed: fp32 [num_experts, a.columns,
// b.columns].
void multiply_for_weights(const Matrix& a, const Matrix& b, const Experts& experts, float* out,
                          bool adds, std::uintptr_t stream);

}  // namespace ncclep::fp8
