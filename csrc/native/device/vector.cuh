// 16-byte vectors of a row in fp32 arithmetic: adding a vector to sums, and rounding sums to a
// vector.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ncclep::native {

template <typename T>
struct Vector;

template <>
struct Vector<float> {
  static constexpr int kWidth = 4;
  __device__ static void add(float* sum, uint4 bits) {
    sum[0] += __uint_as_float(bits.x);
    sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z);
    sum[3] += __uint_as_float(bits.w);
  }
  __device__ static uint4 round(const float* sum) {
    return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                      __float_as_uint(sum[3]));
  }
};

template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kWidth = 8;
  __device__ static void add(float* sum, uint4 bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a bf16 is the upper half of an fp32
      sum[2 * i] += __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 round(const float* sum) {
    uint4 bits;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    return bits;
  }
};

template <>
struct Vector<__half> {
  static constexpr int kWidth = 8;
  __device__ static void add(float* sum, uint4 bits) {
    const auto* pairs = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = __half22float2(pairs[i]);
      sum[2 * i] += both.x;
      sum[2 * i + 1] += both.y;
    }
  }
  __device__ static uint4 round(const float* sum) {
    uint4 bits;
    auto* pairs = reinterpret_cast<__half2*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    return bits;
  }
};

}  // namespace ncclep::native
