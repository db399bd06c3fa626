// A deadline for calls of NCCL that wait for the other ranks without one.
#pragma once

#include <functional>
#include <string>

namespace ncclep {

// Calls `make` on a separate thread with `device` current, unless that is -1.  `poll` is called now
// and then, and may throw.  Throws what `make` throws, and PeerError with the text `late` after
// `timeout_s` seconds; the thread then keeps waiting, so `make` must own what it uses.
void run_with_deadline(const std::function<void()>& make, const std::string& late, int device,
                       double timeout_s, const std::function<void()>& poll);

}  // namespace ncclep
