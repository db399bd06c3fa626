// Launches a kernel whose CTAs wait for each other: all of them are resident at once, or none
// starts.  And what they need of a device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/cuda.h"

namespace ncclep {

// Shared memory of a CTA of `kernel`, static and `dynamic` bytes.  Throws where there is no code of
// it for the current device.
template <typename... Parameters>
std::size_t shared_bytes_of(const char* what, void (*kernel)(Parameters...), std::size_t dynamic) {
  cudaFuncAttributes found{};
  cuda_check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)),
             "looking for the code of ", what, " for this GPU");
  return found.sharedSizeBytes + dynamic;
}

// `what` names the kernel in errors; `parameters` are the kernel's arguments.
template <typename... Parameters>
void launch_cooperatively(const char* what, void (*kernel)(Parameters...), int num_ctas,
                          int num_threads, std::size_t shared_bytes, std::uintptr_t stream,
                          Parameters... parameters) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  cuda_check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "setting the shared memory of ", what);
  void* addresses[] = {&parameters...};
  cuda_check(cudaLaunchCooperativeKernel(function, num_ctas, num_threads, addresses, shared_bytes,
                                         reinterpret_cast<cudaStream_t>(stream)),
             "launching ", what, " on ", num_ctas, " SMs at once, with ", shared_bytes,
             " bytes of shared memory on each,");
}

}  // namespace ncclep
