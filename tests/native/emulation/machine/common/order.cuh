// csrc/common/order.cuh on the emulator.
#pragma once

#include <cuda_runtime.h>

namespace ncclep {

// Who asks for the time is waiting.
inline std::uint64_t now_ns() {
  emu::yield();
  return emu::now();
}
inline std::int64_t ns_since(std::uint64_t start) { return std::int64_t(now_ns() - start); }

inline std::uint64_t load_relaxed(const std::uint64_t* word) {
  emu::yield();
  emu::note_read(word, emu::kSystem);
  return *word;
}
inline std::uint64_t load_acquire(const std::uint64_t* word) {
  const std::uint64_t value = load_relaxed(word);
  emu::take_step(true);
  emu::acquire(emu::kSystem);
  return value;
}
inline void fence_system() { __threadfence_system(); }
inline void store_relaxed(std::uint64_t* word, std::uint64_t value) {
  emu::maybe_yield();
  emu::take_step();
  emu::note_write(word, emu::kSystem, false);
  emu::store_for_all(word, &value, sizeof(value));
  emu::note_progress();
}
inline void store_release(std::uint64_t* word, std::uint64_t value) {
  emu::take_step(true);
  emu::release(emu::kSystem);
  store_relaxed(word, value);
}

}  // namespace ncclep
