// A rank whose arguments are wrong goes no further, and says so to the others without waiting.
#pragma once

#include <cstdint>

#include "native/state.h"

namespace ncclep::native {

// Queues telling all other ranks, which ends their waits, and makes the group fail on this one.
void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream);

}  // namespace ncclep::native
