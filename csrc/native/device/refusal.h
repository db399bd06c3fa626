// A rank with invalid arguments stops here and tells the others without waiting for them.
#pragma once

#include <cstdint>

#include "native/rail_layout.h"
#include "native/state.h"

namespace ncclep::native {

// Queues a kernel that tells all other ranks, which ends their waits, and marks the group failed on
// this one.  `rails` are null unless there are several domains.
void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream,
            const Rails* rails = nullptr);

}  // namespace ncclep::native
