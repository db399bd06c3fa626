// Bulk copies between global and shared memory (TMA without tensor maps, sm_90 and later).
// Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace ncclep {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_barrier(std::uint64_t* full) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full)) : "memory");
}

// After init_barrier, before the first copy.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes global memory that this thread has seen through ordinary loads visible to its bulk copies.
__device__ inline void fence_for_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Starts a copy of `bytes` into shared memory, which completes phase after phase of `full`.
__device__ inline void start_load(void* shared, const void* global, int bytes,
                                  std::uint64_t* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(full))
      : "memory");
}

__device__ inline void wait_for_load(std::uint64_t* full, int parity) {
  std::uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
        "selp.u32 %0, 1, 0, done; }"
        : "=r"(is_done)
        : "r"(shared_address(full)), "r"(parity)
        : "memory");
  }
}

// Starts a copy to global memory, in the thread's current group of stores.
__device__ inline void start_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the thread's last kPending groups of stores have read their shared memory.
template <int kPending>
__device__ inline void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the thread's last kPending groups of stores are written.
template <int kPending>
__device__ inline void wait_for_older_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all stores of the thread are written.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace ncclep
