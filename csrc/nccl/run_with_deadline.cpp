#include "nccl/run_with_deadline.h"

#include <cuda_runtime.h>

#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "common/cuda.h"
#include "common/error.h"
#include "common/pause.h"

namespace ncclep {

void run_with_deadline(const std::function<void()>& make, const std::string& late, int device,
                       double timeout_s, const std::function<void()>& poll) {
  require(timeout_s > 0 && std::isfinite(timeout_s), "a deadline of ", timeout_s,
          " s: it must be positive");
  // Shared with the thread, which may outlive this call.
  struct Made {
    std::mutex mutex;
    std::exception_ptr error;
    bool is_over = false;
  };
  const auto made = std::make_shared<Made>();
  std::thread([=] {
    std::exception_ptr error;
    try {
      // Each thread has its own current device.
      if (device != -1) cuda_check(cudaSetDevice(device), "cudaSetDevice");
      make();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(made->mutex);
    made->error = error;
    made->is_over = true;
  }).detach();
  const auto is_over = [&](double waited) {
    const std::lock_guard lock(made->mutex);
    if (!made->is_over && waited > timeout_s) throw PeerError(late);
    return made->is_over;
  };
  wait_until(is_over, poll);
  if (made->error) std::rethrow_exception(made->error);
}

}  // namespace ncclep
