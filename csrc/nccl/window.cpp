#include "nccl/window.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "common/cuda.h"

namespace ncclep {

namespace {

// The start of what a window handle points to in device memory (NCCL 2.28 and later): the ranks of
// an NVLink domain lie one after the other in a flat address range.  The caller of Window verifies
// the addresses computed from it by writing and reading them.
struct WindowOnDevice {
  void* host_side;
  char* flat_base;
  int lsa_rank;
  int world_rank;
  std::uint32_t stride_4g;  // distance of two ranks, in units of 2^32 bytes
};

constexpr std::size_t kGranularity = 4096;

}  // namespace

Window::Window(std::shared_ptr<Communicator> communicator, std::size_t num_bytes)
    : communicator_(std::move(communicator)),
      num_bytes_((num_bytes + kGranularity - 1) / kGranularity * kGranularity) {
  const Nccl& nccl = communicator_->nccl();
  require(communicator_->lsa_size() == communicator_->num_ranks(), "only ",
          communicator_->lsa_size(), " of ", communicator_->num_ranks(),
          " ranks are in one NVLink domain: a window needs all of them in one");
  void* memory = nullptr;
  nccl.check(nccl.mem_alloc(&memory, num_bytes_), "ncclMemAlloc");
  own_ = static_cast<char*>(memory);
  nccl.check(nccl.window_register(communicator_->get(), own_, num_bytes_, &window_,
                                  kNcclWindowCollSymmetric),
             "ncclCommWindowRegister");
  // NCCL reports success without a window where it cannot make one.
  require(window_ != nullptr,
          "NCCL made no window: it needs CUDA peer-to-peer access between all GPUs of the group "
          "and NCCL_CUMEM_ENABLE other than 0");
  WindowOnDevice on_device;
  cuda_check(cudaMemcpy(&on_device, window_, sizeof(on_device), cudaMemcpyDeviceToHost),
             "reading the window");
  require(
      on_device.world_rank == communicator_->rank() && on_device.lsa_rank == communicator_->rank(),
      "the window names rank ", on_device.world_rank, ", place ", on_device.lsa_rank,
      " of its domain, for rank ", communicator_->rank(),
      ": this NCCL's windows are not laid out as this extension knows them");
  const std::uint64_t stride = static_cast<std::uint64_t>(on_device.stride_4g) << 32;
  for (int rank = 0; rank < communicator_->num_ranks(); ++rank) {
    peers_.push_back(on_device.flat_base + rank * stride);
  }
}

void Window::close() {
  if (window_ == nullptr) return;
  const Nccl& nccl = communicator_->nccl();
  nccl.check(nccl.window_deregister(communicator_->get(), std::exchange(window_, nullptr)),
             "ncclCommWindowDeregister");
  nccl.check(nccl.mem_free(std::exchange(own_, nullptr)), "ncclMemFree");
  peers_.clear();
}

}  // namespace ncclep
