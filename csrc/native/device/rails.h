// What kernels use the network through, made on the host.
#pragma once

#include <memory>
#include <vector>

#include "native/rail_layout.h"
#include "network/rails.h"

namespace ncclep::native {

// For kernels that put into these windows of the communicator that `network` was made with: a
// control and a rows window, or that of a low-latency object.
std::shared_ptr<const Rails> make_rails(const network::Rails& network,
                                        const std::vector<std::shared_ptr<Window>>& windows);

}  // namespace ncclep::native
