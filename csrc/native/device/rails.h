// What kernels use the network through, made on the host.
#pragma once

#include <memory>

#include "native/rail_layout.h"
#include "network/rails.h"

namespace ncclep::native {

// `control` and `rows` are windows of the communicator that `network` was made with.
std::shared_ptr<const Rails> make_rails(const network::Rails& network,
                                        const std::shared_ptr<Window>& control,
                                        const std::shared_ptr<Window>& rows);

}  // namespace ncclep::native
