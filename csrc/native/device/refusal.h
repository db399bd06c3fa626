// A rank with invalid arguments stops here and tells the others without waiting for them.
#pragma once

#include <cstdint>

#include "native/state.h"

namespace ncclep::native {

// Queues a kernel that tells all other ranks, which ends their waits, and marks the group failed on
// this one.
void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream);

}  // namespace ncclep::native
