#include <cuda_runtime.h>

#include "bench/stamp.h"
#include "common/cuda.h"
#include "common/order.cuh"

namespace ncclep::bench {

namespace {

__global__ void stamp_kernel(std::int64_t* to) { *to = static_cast<std::int64_t>(now_ns()); }

}  // namespace

void stamp(std::int64_t* to, std::uintptr_t stream) {
  stamp_kernel<<<1, 1, 0, reinterpret_cast<cudaStream_t>(stream)>>>(to);
  cuda_check(cudaGetLastError(), "launching a stamp");
}

}  // namespace ncclep::bench
