// Queues FP8 products and quantisation; none of these functions waits.
//
// Included by one file that is compiled for sm_90a, which has what hopper.cuh uses.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda.h"
#include "experts/products.cuh"
#include "experts/quantize.cuh"

namespace ncclep::experts {

__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kGemmThreads, 1)
    multiply_rows_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ Gemm gemm) {
  extern __shared__ __align__(1024) char memory[];
  run_gemm<false>(maps, gemm, *reinterpret_cast<GemmShared*>(memory));
}
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kGemmThreads, 1)
    multiply_for_weights_kernel(const __grid_constant__ GemmMaps maps,
                                const __grid_constant__ Gemm gemm) {
  extern __shared__ __align__(1024) char memory[];
  run_gemm<true>(maps, gemm, *reinterpret_cast<GemmShared*>(memory));
}

// Two CTAs on an SM: as many as 64 registers a thread allow.
__global__ void __launch_bounds__(kQuantizeThreads, 2) quantize_rows_kernel(Rows from, Fp8Rows to) {
  __shared__ TileShared shared;
  quantize_rows(from, to, shared);
}
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    pack_rows_kernel(const __nv_bfloat16* from, std::int64_t num_rows, PackedRows to,
                     bool is_power_of_two) {
  pack_rows(from, num_rows, to, is_power_of_two);
}
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    unpack_rows_kernel(PackedRows from, const std::int32_t* offsets, int num_experts, Fp8Rows to) {
  __shared__ TileShared shared;
  unpack_rows(from, offsets, num_experts, to, shared);
}
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    quantize_swiglu_kernel(Swiglu from, Fp8Rows to) {
  __shared__ TileShared shared;
  quantize_swiglu(from, to, shared);
}
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    quantize_swiglu_grads_kernel(Swiglu from, Fp8Rows to) {
  __shared__ TileShared shared;
  quantize_swiglu_grads(from, to, shared);
}
__global__ void __launch_bounds__(kQuantizeThreads, 2) quantize_weights_kernel(Weights job) {
  __shared__ TileShared shared;
  quantize_weights(job, shared);
}

// Each quantises what its kernel does.  `to.num_blocks`: at least as many blocks as the experts'
// rows have, so that the host need not know their offsets.
inline void quantize_rows(const Rows& from, const Fp8Rows& to, cudaStream_t stream) {
  const int tiles = to.num_blocks * (to.columns / kBlock);
  quantize_rows_kernel<<<tiles, kQuantizeThreads, 0, stream>>>(from, to);
  cuda_check(cudaGetLastError(), "launching the quantisation of rows");
}
inline void pack_rows(const __nv_bfloat16* from, std::int64_t num_rows, const PackedRows& to,
                      bool is_power_of_two, cudaStream_t stream) {
  const auto tiles = static_cast<int>((num_rows + kBlock - 1) / kBlock * (to.columns / kBlock));
  pack_rows_kernel<<<tiles, kQuantizeThreads, 0, stream>>>(from, num_rows, to, is_power_of_two);
  cuda_check(cudaGetLastError(), "launching the packing of rows");
}
inline void unpack_rows(const PackedRows& from, const std::int32_t* offsets, int num_experts,
                        const Fp8Rows& to, cudaStream_t stream) {
  const int tiles = to.num_blocks * (to.columns / kBlock);
  unpack_rows_kernel<<<tiles, kQuantizeThreads, 0, stream>>>(from, offsets, num_experts, to);
  cuda_check(cudaGetLastError(), "launching the unpacking of rows");
}
inline void quantize_swiglu(const Swiglu& from, const Fp8Rows& to, cudaStream_t stream) {
  const int tiles = to.num_blocks * (from.columns / kBlock);
  quantize_swiglu_kernel<<<tiles, kQuantizeThreads, 0, stream>>>(from, to);
  cuda_check(cudaGetLastError(), "launching SwiGLU in FP8");
}
inline void quantize_swiglu_grads(const Swiglu& from, const Fp8Rows& to, cudaStream_t stream) {
  const int tiles = to.num_blocks * (from.columns / kBlock);
  quantize_swiglu_grads_kernel<<<tiles, kQuantizeThreads, 0, stream>>>(from, to);
  cuda_check(cudaGetLastError(), "launching SwiGLU's gradients in FP8");
}
inline void quantize_weights(const Weights& job, int num_experts, cudaStream_t stream) {
  const int tiles = num_experts * (job.rows / kBlock) * (job.columns / kBlock);
  quantize_weights_kernel<<<tiles, kQuantizeThreads, 0, stream>>>(job);
  cuda_check(cudaGetLastError(), "launching the quantisation of weights");
}

// The tensor map of a matrix; a box is what one copy moves.  `pitch`: elements from a row to the
// next; 0: as many as it is wide.
template <typename T>
CUtensorMap map_of(const T* matrix, std::int64_t width, std::int64_t height, int box_width,
                   int box_height, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                   std::int64_t pitch = 0) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    const auto result = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &status);
#else
    const auto result =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
    cuda_check(result, "looking for cuTensorMapEncodeTiled");
    if (found == nullptr) fail("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const auto type = sizeof(T) == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height)};
  const cuuint64_t pitches[] = {static_cast<cuuint64_t>(pitch > 0 ? pitch : width) * sizeof(T)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_width),
                            static_cast<cuuint32_t>(box_height)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 2, const_cast<T*>(matrix), sizes, pitches, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail("no tensor map of ", height, " x ", width, " elements of ", sizeof(T), " bytes: error ",
         static_cast<int>(result));
  }
  return map;
}
inline CUtensorMap map_of_scales(const float* scales, std::int64_t width, std::int64_t height,
                                 int box) {
  return map_of(scales, width, height, box, 1, CU_TENSOR_MAP_SWIZZLE_NONE);
}

inline void launch_gemm(void (*kernel)(GemmMaps, Gemm), const GemmMaps& maps, const Gemm& gemm,
                        int num_sms, cudaStream_t stream) {
  constexpr int kBytes = sizeof(GemmShared);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "setting the shared memory of an FP8 product");
  const int ctas = num_sms / kClusterCtas * kClusterCtas;
  kernel<<<ctas, kGemmThreads, kBytes, stream>>>(maps, gemm);
  cuda_check(cudaGetLastError(), "launching an FP8 product on ", ctas, " SMs");
}

// out = a @ b^T for each expert: a [num_rows, depth] by rows, b [num_experts, columns, depth] with
// scales [num_experts, columns / 128, depth / 128], out bf16 [num_rows, columns].  Depth is a
// multiple of 128, columns of 256.
inline void multiply_rows(const Fp8Rows& a, std::int64_t num_rows, const std::uint8_t* b,
                          const float* scales_b, const std::int32_t* offsets, int num_experts,
                          int columns, __nv_bfloat16* out, int num_sms, cudaStream_t stream) {
  const CUtensorMap map_of_a =
      map_of(a.rows, a.columns, num_rows, kBlock, kTileRows, CU_TENSOR_MAP_SWIZZLE_128B, a.pitch);
  const GemmMaps maps{map_of_a,
                      map_of(b, a.columns, std::int64_t{num_experts} * columns, kBlock,
                             kTileColumns / kClusterCtas),
                      map_of_scales(a.scales, a.scales_pitch, a.columns / kBlock, kScalesOfA),
                      map_of(out, columns, num_rows, kOutColumns<__nv_bfloat16>, kOutRows),
                      {}};
  const Gemm gemm{offsets, num_experts, 0, columns, a.columns, scales_b, out, false};
  launch_gemm(multiply_rows_kernel, maps, gemm, num_sms, stream);
}

// out (+)= a^T @ b for each expert, from what is transposed: out fp32 [num_experts, a's columns,
// b's columns], multiples of 128 and 256.
inline void multiply_for_weights(const Fp8Rows& a, const Fp8Rows& b, const std::int32_t* offsets,
                                 int num_experts, float* out, bool adds, int num_sms,
                                 cudaStream_t stream) {
  const std::int64_t num_blocks = a.num_blocks;
  const GemmMaps maps{
      map_of(a.transposed, kBlock, num_blocks * a.columns, kBlock, kTileRows),
      map_of(b.transposed, kBlock, num_blocks * b.columns, kBlock, kTileColumns / kClusterCtas),
      map_of_scales(a.scales_transposed, a.columns, num_blocks, kScalesOfA),
      map_of(out, b.columns, std::int64_t{num_experts} * a.columns, kOutColumns<float>, kOutRows),
      map_of_scales(b.scales_transposed, b.columns, num_blocks, kTileColumns)};
  const Gemm gemm{offsets, num_experts, a.columns, b.columns, 0, nullptr, nullptr, adds};
  launch_gemm(multiply_for_weights_kernel, maps, gemm, num_sms, stream);
}

}  // namespace ncclep::experts
