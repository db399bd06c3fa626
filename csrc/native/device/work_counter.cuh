// Work that warps take item by item, in order, so that warps can join when their other work is
// done.
#pragma once

#include <cuda_runtime.h>

#include "native/state.h"

namespace ncclep::native {

// One warp's access to the work items of the current operation, numbered from 0.  `leave` resets
// the counter.
class WorkCounter {
 public:
  __device__ explicit WorkCounter(const KernelContext& ctx) : next_(&ctx.state->next) { ask(); }

  // The next number that no other warp has taken; numbers continue past the last item.  All lanes
  // call it.
  __device__ int take() {
    const int taken = __shfl_sync(~0u, asked_, 0);
    ask();  // prefetch: the atomic takes as long as a small load
    return taken;
  }

 private:
  __device__ void ask() {
    if (threadIdx.x % kWarpSize == 0) asked_ = static_cast<int>(atomicAdd(next_, 1u));
  }

  unsigned int* next_;
  int asked_ = 0;
};

}  // namespace ncclep::native
