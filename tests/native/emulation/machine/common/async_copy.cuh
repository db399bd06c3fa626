// csrc/common/async_copy.cuh on the emulator.
#pragma once

#include <cuda_runtime.h>

namespace ncclep {

inline void copy_async(void* shared, const void* global) {
  emu::Copy copy{static_cast<char*>(shared), static_cast<const char*>(global), 16,
                 emu::self().view.seen};
  if (emu::draw(2) == 0) copy.do_read();
  emu::note_store_to_shared(copy.to, copy.bytes);
  std::memset(shared, 0x77, 16);  // what is there before the copy has come must not be used
  emu::self().open_loads.push_back(std::move(copy));
}
inline void commit_copies() {
  emu::self().loads.push_back(std::move(emu::self().open_loads));
  emu::self().open_loads.clear();
}
template <int kPending>
void wait_for_copies() {
  emu::finish(emu::self().loads, kPending);
}

}  // namespace ncclep
