#include "native/device/rails.cuh"
#include "native/device/rails.h"

namespace ncclep::native {

std::shared_ptr<const Rails> make_rails(
    [[maybe_unused]] const network::Rails& network,
    [[maybe_unused]] const std::vector<std::shared_ptr<Window>>& windows) {
#ifdef NCCLEP_NCCL_HEADERS
  static_assert(kControlWindow == 0 && kRowsWindow == 1);
  return std::make_shared<Rails>(Rails{*network.rail(windows)});
#else
  return nullptr;
#endif
}

}  // namespace ncclep::native
