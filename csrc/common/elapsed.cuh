// How long something takes, by the clock of the GPU.
#pragma once

#include <cstdint>

#include "common/order.cuh"

namespace ncclep {

// Nanoseconds since `start`, a reading of the clock.  Negative where the clock has gone back since,
// which PTX does not rule out: as an unsigned number that would be centuries, and end a wait.
__device__ inline std::int64_t ns_since(std::uint64_t start) {
  return static_cast<std::int64_t>(now_ns() - start);
}

}  // namespace ncclep
