// Asynchronous 16-byte copies from global to shared memory.  After its wait, a thread sees its own
// copies; other threads need a barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ncclep {

__device__ inline void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

// Ends the thread's current group of copies, which may be empty.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the thread's last kPending groups of copies have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ncclep
