#include "nccl/window.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "common/cuda.h"
#include "nccl/window_of_2_28.h"

namespace ncclep {

namespace {

constexpr std::size_t kGranularity = 4096;

}  // namespace

Window::Window(std::shared_ptr<Communicator> communicator, std::size_t num_bytes, Reach reach)
    : communicator_(std::move(communicator)),
      num_bytes_((num_bytes + kGranularity - 1) / kGranularity * kGranularity) {
  const Nccl& nccl = communicator_->nccl();
  require(reach == Reach::kNetwork || communicator_->lsa_size() == communicator_->num_ranks(),
          "only ", communicator_->lsa_size(), " of ", communicator_->num_ranks(),
          " ranks are in one NVLink domain: a window needs all of them in one");
  require(reach == Reach::kDomain || nccl.get_peer_pointer != nullptr, "NCCL ", nccl.version_text(),
          " has no windows over a network: 2.30.7 or newer is needed");
  require(0 < num_bytes && num_bytes <= INT64_MAX, "a window of ", num_bytes, " bytes");
  void* memory = nullptr;
  nccl.check(nccl.mem_alloc(&memory, num_bytes_),
             join_text("ncclMemAlloc of ", num_bytes_, " bytes").c_str());
  ensure(memory != nullptr, "ncclMemAlloc gave no memory");
  own_ = static_cast<char*>(memory);
}

Window::~Window() {
  if (window_ == nullptr && own_ != nullptr) communicator_->nccl().mem_free(own_);
}

void Window::open() {
  require(own_ != nullptr && window_ == nullptr, "the window was opened or closed before");
  const Nccl& nccl = communicator_->nccl();
  nccl.check(nccl.window_register(communicator_->get(), own_, num_bytes_, &window_,
                                  kNcclWindowCollSymmetric),
             "ncclCommWindowRegister");
  // NCCL reports success without a window where it cannot make one.
  ensure(window_ != nullptr,
         "NCCL made no window: it needs CUDA peer-to-peer access between all GPUs of the group "
         "and NCCL_CUMEM_ENABLE other than 0");
  peers_ = nccl.get_peer_pointer ? query_peers() : read_peers_from_struct();
}

std::vector<char*> Window::query_peers() const {
  const Nccl& nccl = communicator_->nccl();
  std::vector<char*> peers;
  for (int local_rank = 0; local_rank < communicator_->lsa_size(); ++local_rank) {
    const int rank = communicator_->rank_in_domain(local_rank);
    void* address = nullptr;
    nccl.check(nccl.get_peer_pointer(window_, 0, rank, &address), "ncclGetPeerDevicePointer");
    ensure(address != nullptr, "NCCL has no address for the window of rank ", rank,
           ", which it says is in this rank's NVLink domain");
    peers.push_back(static_cast<char*>(address));
  }
  return peers;
}

std::vector<char*> Window::read_peers_from_struct() const {
  char head[kWindowHeadBytes];
  cuda_check(cudaMemcpy(head, window_, sizeof(head), cudaMemcpyDeviceToHost), "reading the window");
  return peers_in(head, sizeof(head), communicator_->rank(), communicator_->num_ranks());
}

void Window::close() {
  const Nccl& nccl = communicator_->nccl();
  peers_.clear();
  if (window_ != nullptr) {
    nccl.check(nccl.window_deregister(communicator_->get(), std::exchange(window_, nullptr)),
               "ncclCommWindowDeregister");
  }
  if (own_ != nullptr) nccl.check(nccl.mem_free(std::exchange(own_, nullptr)), "ncclMemFree");
}

}  // namespace ncclep
