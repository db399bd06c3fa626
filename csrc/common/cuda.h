// Checks of the CUDA runtime's results.
#pragma once

#include <cuda_runtime.h>

#include "common/error.h"

namespace ncclep {

inline void cuda_check(cudaError_t result, const char* call) {
  if (result != cudaSuccess) fail(call, " failed: ", cudaGetErrorString(result));
}

}  // namespace ncclep
