// How a rank begins to put over the network, and how it stops: in the middle, because its arguments
// are invalid, or at the end.
#pragma once

#include <cstdint>

#include "native/rail_layout.h"
#include "native/state.h"

namespace ncclep::native {

// Queues a kernel that tells all other ranks without waiting for them, which ends their waits in
// the operation that would be next and in later ones, and marks the group failed on this one.
// `rails` are null unless there are several domains.
template <int kGroups>
void refuse(const KernelContextOf<kGroups>& ctx, Phase phase, std::uintptr_t stream,
            const Rails* rails = nullptr);

// Queues a kernel that reads how far NCCL's queues are, while nothing puts into them.
template <int kGroups>
void begin_puts(const KernelContextOf<kGroups>& ctx, std::uintptr_t stream, const Rails& rails);

// Queues a kernel that waits, at most for the deadline and whether or not the group has failed,
// until nothing is on its way from or to the rail peers: then their windows and this rank's may
// close. Collective.
template <int kGroups>
void drain_network(const KernelContextOf<kGroups>& ctx, std::uintptr_t stream, const Rails& rails);

}  // namespace ncclep::native
