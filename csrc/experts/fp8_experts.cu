// Compiled for sm_90a alone: hopper.cuh uses what no other GPU has.
#include "experts/fp8_experts.h"
#include "experts/launch.cuh"

namespace ncclep::fp8 {

namespace {

static_assert(kBlock == experts::kBlock);

cudaStream_t handle(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

experts::Fp8Rows rows_of(const Matrix& matrix, Scales scales) {
  return {matrix.rows,
          matrix.scales,
          matrix.transposed,
          matrix.scales_transposed,
          matrix.columns,
          matrix.pitch,
          matrix.scales_pitch,
          matrix.num_blocks,
          scales == Scales::kPowersOfTwo};
}

experts::PackedRows packed_rows_of(std::uint8_t* packed, int columns) {
  return {packed, columns, static_cast<int>(packed_bytes(columns))};
}

experts::Swiglu swiglu_of(const Swiglu& from, const Experts& of) {
  return {static_cast<const __nv_bfloat16*>(from.inputs),
          from.probs,
          static_cast<const __nv_bfloat16*>(from.grads),
          from.prob_grads,
          of.offsets,
          of.num_experts,
          from.columns,
          from.probs_pitch};
}

// All SMs of the current device.
int num_sms() {
  int device = 0, count = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "counting a GPU's SMs");
  return count;
}

}  // namespace

void quantize_rows(const void* values, const Experts& of, const Matrix& to, Scales scales,
                   std::uintptr_t stream) {
  if (to.num_rows == 0) return;
  experts::quantize_rows({static_cast<const __nv_bfloat16*>(values), of.offsets, of.num_experts},
                         rows_of(to, scales), handle(stream));
}

void pack_rows(const void* values, std::int64_t num_rows, int columns, std::uint8_t* packed,
               Scales scales, std::uintptr_t stream) {
  if (num_rows == 0) return;
  experts::pack_rows(static_cast<const __nv_bfloat16*>(values), num_rows,
                     packed_rows_of(packed, columns), scales == Scales::kPowersOfTwo,
                     handle(stream));
}

void unpack_rows(const std::uint8_t* packed, const Experts& of, const Matrix& to, Scales scales,
                 std::uintptr_t stream) {
  if (to.num_rows == 0) return;
  experts::unpack_rows(packed_rows_of(const_cast<std::uint8_t*>(packed), to.columns), of.offsets,
                       of.num_experts, rows_of(to, scales), handle(stream));
}

void quantize_swiglu(const Swiglu& from, const Experts& of, const Matrix& to, Scales scales,
                     std::uintptr_t stream) {
  if (to.num_rows == 0) return;
  experts::quantize_swiglu(swiglu_of(from, of), rows_of(to, scales), handle(stream));
}

void quantize_swiglu_gradients(const Swiglu& from, const Experts& of, const Matrix& to,
                               Scales scales, std::uintptr_t stream) {
  if (to.num_rows == 0) return;
  experts::quantize_swiglu_grads(swiglu_of(from, of), rows_of(to, scales), handle(stream));
}

void quantize_weights(const Weights& weights, Scales scales, std::uintptr_t stream) {
  const experts::Weights job{static_cast<const __nv_bfloat16*>(weights.values),
                             weights.fp8,
                             weights.transposed,
                             weights.scales,
                             weights.scales_transposed,
                             weights.rows,
                             weights.columns,
                             scales == Scales::kPowersOfTwo};
  experts::quantize_weights(job, weights.num_experts, handle(stream));
}

void multiply_rows(const Matrix& a, const std::uint8_t* b, const float* scales_b, const Experts& of,
                   int columns, void* out, std::uintptr_t stream) {
  if (a.num_rows == 0) return;  // there is no tensor map of nothing
  experts::multiply_rows(rows_of(a, Scales::kAny), a.num_rows, b, scales_b, of.offsets,
                         of.num_experts, columns, static_cast<__nv_bfloat16*>(out), num_sms(),
                         handle(stream));
}

void multiply_for_weights(const Matrix& a, const Matrix& b, const Experts& of, float* out,
                          bool adds, std::uintptr_t stream) {
  experts::multiply_for_weights(rows_of(a, Scales::kAny), rows_of(b, Scales::kAny), of.offsets,
                                of.num_experts, out, adds, num_sms(), handle(stream));
}

}  // namespace ncclep::fp8
