// Loads, stores and fences with an order that other ranks observe, and the clock.
#pragma once

#include <cstdint>

namespace ncclep {

__device__ inline std::uint64_t now_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Nanoseconds since `start`, a reading of the clock.  Negative where the clock has gone back since,
// which PTX does not rule out: as an unsigned number that would be centuries, and end a wait.
__device__ inline std::int64_t ns_since(std::uint64_t start) {
  return static_cast<std::int64_t>(now_ns() - start);
}

__device__ inline std::uint64_t load_acquire(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Does not order later accesses after it: for polling loops.
__device__ inline std::uint64_t load_relaxed(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Orders earlier loads by load_relaxed before everything that follows.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline void store_release(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// For words that carry their whole message, so nothing else has to be visible with them.
__device__ inline void store_relaxed(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

}  // namespace ncclep
