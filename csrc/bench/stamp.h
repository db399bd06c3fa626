// The device's clock between two kernels: an event of a CUDA graph takes microseconds itself.
#pragma once

#include <cstdint>

namespace ncclep::bench {

// Queues a kernel that writes the time, in nanoseconds of the GPU's own clock.
void stamp(std::int64_t* to, std::uintptr_t stream);

}  // namespace ncclep::bench
