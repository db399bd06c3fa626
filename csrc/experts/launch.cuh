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
  run_gemm<false>(maps, gemm, *reinterpret_cast<RowsShared*>(memory));
}
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kGemmThreads, 1)
    multiply_for_weights_kernel(const __grid_constant__ GemmMaps maps,
                                const __grid_constant__ Gemm gemm) {
  extern __shared__ __align__(1024) char memory[];
  run_gemm<true>(maps, gemm, *reinterpret_cast<WeightsShared*>(memory));
}

// Two CTAs on an SM: as many threads as there can be.
__global__ void __launch_bounds__(kQuantizeThreads, 2) quantize_rows_kernel(Rows from, Fp8Rows to) {
  __shared__ TileShared shared;
  quantize_rows(from, to, shared);
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

// The tensor map of a matrix; a box is what one copy moves.
inline CUtensorMap map_of(const void* matrix, CUtensorMapDataType type, int itemsize,
                          std::int64_t width, std::int64_t height, int box_width, int box_height) {
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
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(width * itemsize)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_width),
                            static_cast<cuuint32_t>(box_height)};
  const cuuint32_t steps[] = {1, 1};
  const auto swizzle = itemsize == 1 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 2, const_cast<void*>(matrix), sizes, pitch, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail("no tensor map of ", height, " x ", width, " elements of ", itemsize, " bytes: error ",
         static_cast<int>(result));
  }
  return map;
}
inline CUtensorMap map_of_fp8(const std::uint8_t* matrix, std::int64_t width, std::int64_t height) {
  constexpr int kRowsOfBox = kTileRows;  // and half of a tile's columns
  static_assert(kTileColumns / kClusterCtas == kRowsOfBox);
  return map_of(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, width, height, kBlock, kRowsOfBox);
}
inline CUtensorMap map_of_scales(const float* scales, std::int64_t width, std::int64_t height,
                                 int box) {
  return map_of(scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, width, height, box, 1);
}

template <typename Shared>
void launch_gemm(void (*kernel)(GemmMaps, Gemm), const GemmMaps& maps, const Gemm& gemm,
                 int num_sms, cudaStream_t stream) {
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
      "setting the shared memory of an FP8 product");
  const int ctas = num_sms / kClusterCtas * kClusterCtas;
  kernel<<<ctas, kGemmThreads, sizeof(Shared), stream>>>(maps, gemm);
  cuda_check(cudaGetLastError(), "launching an FP8 product on ", ctas, " SMs");
}

// out = a @ b^T for each expert: a [num_rows, depth] by rows, b [num_experts, columns, depth] with
// scales [num_experts, columns / 128, depth / 128], out bf16 [num_rows, columns].  Depth is a
// multiple of 128, columns of 256.
inline void multiply_rows(const Fp8Rows& a, std::int64_t num_rows, const std::uint8_t* b,
                          const float* scales_b, const std::int32_t* offsets, int num_experts,
                          int columns, __nv_bfloat16* out, int num_sms, cudaStream_t stream) {
  const GemmMaps maps{map_of_fp8(a.rows, a.columns, num_rows),
                      map_of_fp8(b, a.columns, std::int64_t{num_experts} * columns),
                      map_of_scales(a.scales, a.scales_pitch, a.columns / kBlock, kScalesOfA),
                      {}};
  const Gemm gemm{offsets, num_experts, 0, columns, a.columns, scales_b, out, false};
  launch_gemm<RowsShared>(multiply_rows_kernel, maps, gemm, num_sms, stream);
}

// out (+)= a^T @ b for each expert, from what is transposed: out fp32 [num_experts, a's columns,
// b's columns], multiples of 256.
inline void multiply_for_weights(const Fp8Rows& a, const Fp8Rows& b, const std::int32_t* offsets,
                                 int num_experts, float* out, bool adds, int num_sms,
                                 cudaStream_t stream) {
  const GemmMaps maps{map_of_fp8(a.transposed, kBlock, std::int64_t{a.num_blocks} * a.columns),
                      map_of_fp8(b.transposed, kBlock, std::int64_t{b.num_blocks} * b.columns),
                      map_of_scales(a.scales_transposed, a.columns, a.num_blocks, kScalesOfA),
                      map_of_scales(b.scales_transposed, b.columns, b.num_blocks, kTileColumns)};
  const Gemm gemm{offsets, num_experts, a.columns, b.columns, 0, nullptr, out, adds};
  launch_gemm<WeightsShared>(multiply_for_weights_kernel, maps, gemm, num_sms, stream);
}

}  // namespace ncclep::experts
