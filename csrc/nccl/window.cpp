#include "nccl/window.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "common/cuda.h"

namespace ncclep {

namespace {

// The head of the struct that a window handle points to in device memory (NCCL 2.28 and later): the
// ranks of an NVLink domain are one after the other in a flat address range.  No header documents
// this, so the code that opens a window must verify the addresses by writing and reading (the
// native engine does so when it makes windows).
struct WindowOnDevice {
  void* host_side;
  char* flat_base;
  int lsa_rank;
  int world_rank;
  std::uint32_t stride_4g;  // distance between consecutive ranks, in units of 2^32 bytes
};

// More ranks than any NVLink domain has.
constexpr int kMaxRanks = 4096;
constexpr std::size_t kGranularity = 4096;
// Rows are copied in vectors, and by bulk copies, of this many bytes.
constexpr std::uintptr_t kAlignment = 16;

}  // namespace

std::vector<char*> peers_in(const void* head, std::size_t num_bytes, int rank, int num_ranks) {
  WindowOnDevice window;
  require(0 <= rank && rank < num_ranks && num_ranks <= kMaxRanks, "rank ", rank, " of ", num_ranks,
          " of a window: at most ", kMaxRanks, " ranks");
  require(num_bytes >= sizeof(window), "the head of a window has ", sizeof(window), " bytes, not ",
          num_bytes);
  std::memcpy(&window, head, sizeof(window));
  const auto unknown = [](const auto&... what) {
    fail(what..., ": this NCCL lays out its windows in a way that this extension does not know");
  };
  if (window.world_rank != rank || window.lsa_rank != rank) {
    unknown("the window names rank ", window.world_rank, ", place ", window.lsa_rank,
            " of its domain, for rank ", rank);
  }
  if (window.flat_base == nullptr) unknown("the window has no address");
  if (window.stride_4g == 0 && num_ranks > 1) unknown("the window has all ranks at one address");
  if (reinterpret_cast<std::uintptr_t>(window.flat_base) % kAlignment != 0) {
    unknown("the window starts at ", static_cast<void*>(window.flat_base), ", not a multiple of ",
            kAlignment);
  }
  const std::uint64_t stride = static_cast<std::uint64_t>(window.stride_4g) << 32;
  const auto base = reinterpret_cast<std::uintptr_t>(window.flat_base);
  if (base > INTPTR_MAX || stride > (INTPTR_MAX - base) / num_ranks) {
    unknown("the window's ranks lie beyond any address: from ",
            static_cast<void*>(window.flat_base), " on, ", stride, " bytes each");
  }
  std::vector<char*> peers;
  for (int r = 0; r < num_ranks; ++r) peers.push_back(window.flat_base + r * stride);
  return peers;
}

Window::Window(std::shared_ptr<Communicator> communicator, std::size_t num_bytes)
    : communicator_(std::move(communicator)),
      num_bytes_((num_bytes + kGranularity - 1) / kGranularity * kGranularity) {
  const Nccl& nccl = communicator_->nccl();
  require(communicator_->lsa_size() == communicator_->num_ranks(), "only ",
          communicator_->lsa_size(), " of ", communicator_->num_ranks(),
          " ranks are in one NVLink domain: a window needs all of them in one");
  require(0 < num_bytes && num_bytes <= INT64_MAX, "a window of ", num_bytes, " bytes");
  void* memory = nullptr;
  nccl.check(nccl.mem_alloc(&memory, num_bytes_), "ncclMemAlloc");
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
  WindowOnDevice head;
  cuda_check(cudaMemcpy(&head, window_, sizeof(head), cudaMemcpyDeviceToHost),
             "reading the window");
  peers_ = peers_in(&head, sizeof(head), communicator_->rank(), communicator_->num_ranks());
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
