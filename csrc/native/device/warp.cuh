// Sums over the lanes of a warp.
#pragma once

#include <cuda_runtime.h>

#include "native/state.h"

namespace ncclep::native {

__device__ inline int warp_sum(int value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}

// The sum of the values of this lane and those before it.
__device__ inline int warp_scan(int value) {
  const int lane = threadIdx.x % kWarpSize;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

}  // namespace ncclep::native
