// csrc/common/bulk_copy.cuh on the emulator.
#pragma once

#include <cuda_runtime.h>

namespace ncclep {

inline void require_vectors(const void* shared, const void* global, int bytes) {
  const auto addresses =
      reinterpret_cast<std::uintptr_t>(shared) | reinterpret_cast<std::uintptr_t>(global);
  EMU_REQUIRE(bytes > 0 && bytes % 16 == 0 && addresses % 16 == 0);
}

inline void init_barrier(std::uint64_t* full) { *full = 0; }
inline void fence_barriers() {}
inline void fence_for_bulk_copies() {
  emu::fence_proxy();
  emu::maybe_yield();
}

inline void start_load(void* shared, const void* global, int bytes, std::uint64_t* full) {
  require_vectors(shared, global, bytes);
  emu::start_load(shared, global, bytes, full);
}
inline void wait_for_load(std::uint64_t* full, int parity) { emu::wait_for_load(full, parity); }

inline void start_store(void* global, const void* shared, int bytes) {
  require_vectors(shared, global, bytes);
  emu::require_fenced(static_cast<const char*>(shared), bytes);
  emu::self().open_stores.push_back(
      {static_cast<char*>(global), static_cast<const char*>(shared), bytes, nullptr, true});
}
inline void commit_stores() {
  emu::self().stores.push_back(std::move(emu::self().open_stores));
  emu::self().open_stores.clear();
  emu::maybe_yield();
}
template <int kPending>
void wait_for_reads_of_stores() {
  auto& groups = emu::self().stores;
  for (int i = 0; i < static_cast<int>(groups.size()) - kPending; ++i) {
    for (emu::Copy& copy : groups[i]) copy.do_read();
  }
  emu::maybe_yield();
}
template <int kPending>
void wait_for_older_stores() {
  emu::finish(emu::self().stores, kPending);
}
inline void wait_for_stores() { wait_for_older_stores<0>(); }

}  // namespace ncclep
