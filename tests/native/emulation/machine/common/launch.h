// csrc/common/launch.h on the emulator.
#pragma once

#include <cuda_runtime.h>

#include "common/error.h"

namespace ncclep {

template <typename... Parameters>
void launch_cooperatively(const char*, void (*kernel)(Parameters...), int num_ctas, int num_threads,
                          std::size_t shared_bytes, std::uintptr_t stream,
                          Parameters... parameters) {
  emu::start(kernel, num_ctas, num_threads, shared_bytes, stream, parameters...);
}

template <typename Kernel>
std::size_t shared_bytes_of(const char*, Kernel, std::size_t dynamic) {
  return dynamic;
}

}  // namespace ncclep
