// In place of rails: nothing goes over them.
#include "native/device/rails.h"

namespace ncclep {

namespace native {

std::shared_ptr<const Rails> make_rails(const network::Rails&,
                                        const std::vector<std::shared_ptr<Window>>& windows) {
  // Not null; no kernel looks into them.
  return {windows.at(0), reinterpret_cast<const Rails*>(windows.at(0).get())};
}

}  // namespace native

namespace network {

Rails::Rails(std::shared_ptr<Communicator> communicator, double, const std::function<void()>&, int)
    : num_domains_(communicator->num_domains()) {}
void Rails::close() {}

}  // namespace network

}  // namespace ncclep
