// Checks of the CUDA runtime's results.
#pragma once

#include <cuda_runtime.h>

#include "common/error.h"

namespace ncclep {

// `call`: the parts of the text that names what was called.
template <typename... Text>
void cuda_check(cudaError_t result, const Text&... call) {
  if (result != cudaSuccess) fail(call..., " failed: ", cudaGetErrorString(result));
}

}  // namespace ncclep
