// csrc/common/order.cuh on the emulator, where everything is seen at once and in order.
#pragma once

#include <cuda_runtime.h>

namespace ncclep {

// Who asks for the time is waiting.
inline std::uint64_t now_ns() {
  emu::yield();
  return emu::now();
}

inline std::uint64_t load_relaxed(const std::uint64_t* word) {
  emu::yield();
  return *word;
}
inline std::uint64_t load_acquire(const std::uint64_t* word) { return load_relaxed(word); }
inline void fence_system() { emu::maybe_yield(); }
inline void store_relaxed(std::uint64_t* word, std::uint64_t value) {
  emu::maybe_yield();
  *word = value;
  emu::note_progress();
}
inline void store_release(std::uint64_t* word, std::uint64_t value) { store_relaxed(word, value); }

}  // namespace ncclep
