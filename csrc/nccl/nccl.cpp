#include "nccl/nccl.h"

#include <cuda_runtime.h>

#include <cmath>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "common/cuda.h"
#include "common/pause.h"

namespace ncclep {

Nccl::Nccl(const std::string& path) : library_(path) {
  library_.find("ncclGetVersion", get_version);
  library_.find("ncclGetUniqueId", get_unique_id);
  library_.find("ncclCommInitRank", comm_init_rank);
  library_.find("ncclCommDestroy", comm_destroy);
  library_.find("ncclCommAbort", comm_abort);
  library_.find("ncclTeamLsa", team_lsa);
  library_.find("ncclAllGather", all_gather);
  library_.find("ncclMemAlloc", mem_alloc);
  library_.find("ncclMemFree", mem_free);
  library_.find("ncclCommWindowRegister", window_register);
  library_.find("ncclCommWindowDeregister", window_deregister);
  library_.find("ncclGetErrorString", get_error_string);
  library_.find("ncclGetLastError", get_last_error);
}

int Nccl::version() const {
  int version = 0;
  check(get_version(&version), "ncclGetVersion");
  return version;
}

std::string Nccl::version_text() const {
  const int code = version();
  return join_text(code / 10000, ".", code % 10000 / 100, ".", code % 100);
}

NcclUniqueId Nccl::unique_id() const {
  NcclUniqueId id;
  check(get_unique_id(&id), "ncclGetUniqueId");
  return id;
}

void Nccl::check(NcclResult result, const char* call) const {
  if (result == 0) return;
  const char* detail = get_last_error(nullptr);
  fail(call, " failed: ", get_error_string(result), detail && *detail ? "; " : "",
       detail ? detail : "", " (NCCL_DEBUG=WARN says more)");
}

Communicator::Communicator(std::shared_ptr<Nccl> nccl, const NcclUniqueId& id, int num_ranks,
                           int rank)
    : nccl_(std::move(nccl)), num_ranks_(num_ranks), rank_(rank) {
  require(0 <= rank && rank < num_ranks, "rank ", rank, " of ", num_ranks);
  nccl_->check(nccl_->comm_init_rank(&comm_, num_ranks, id, rank), "ncclCommInitRank");
  lsa_size_ = nccl_->team_lsa(comm_).num_ranks;
}

std::shared_ptr<Communicator> Communicator::connect(std::shared_ptr<Nccl> nccl,
                                                    const NcclUniqueId& id, int num_ranks, int rank,
                                                    int device, double timeout_s,
                                                    const std::function<void()>& poll) {
  require(timeout_s > 0 && std::isfinite(timeout_s), "a deadline of ", timeout_s,
          " s: it must be positive");
  // Shared with the thread, which may outlive this call.
  struct Made {
    std::mutex mutex;
    std::shared_ptr<Communicator> communicator;
    std::exception_ptr error;
    bool is_over = false;
  };
  const auto made = std::make_shared<Made>();
  // Without a device NCCL reports the error.
  if (device == -1 && cudaGetDevice(&device) != cudaSuccess) device = -1;
  std::thread([=] {
    std::shared_ptr<Communicator> communicator;
    std::exception_ptr error;
    try {
      // Each thread has its own current device.
      if (device != -1) cuda_check(cudaSetDevice(device), "cudaSetDevice");
      communicator = std::make_shared<Communicator>(nccl, id, num_ranks, rank);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(made->mutex);
    made->communicator = std::move(communicator);
    made->error = error;
    made->is_over = true;
  }).detach();
  const auto is_over = [&](double waited) {
    const std::lock_guard lock(made->mutex);
    if (!made->is_over && waited > timeout_s) {
      throw PeerError(join_text(
          "no communicator over the ", num_ranks, " ranks of the expert-parallel group within ",
          timeout_s, " s: look at the other ranks' output, or at NCCL's own with NCCL_DEBUG=INFO"));
    }
    return made->is_over;
  };
  wait_until(is_over, poll);
  if (made->error) std::rethrow_exception(made->error);
  return made->communicator;
}

void Communicator::all_gather(const void* mine, std::size_t num_bytes, void* all, const char* what,
                              double timeout_s, const std::function<void()>& poll) const {
  char* memory = nullptr;
  cudaStream_t stream = nullptr;
  const std::size_t all_bytes = num_bytes * num_ranks_;
  cuda_check(cudaMalloc(&memory, num_bytes + all_bytes), "cudaMalloc");
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  char* const from = memory + all_bytes;
  cuda_check(cudaMemcpy(from, mine, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  nccl_->check(nccl_->all_gather(from, memory, num_bytes, kNcclUint8, get(), stream),
               "ncclAllGather");
  const auto is_over = [&](double waited) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) cuda_check(status, what);
    if (status == cudaErrorNotReady && waited > timeout_s) {
      throw PeerError(join_text("rank ", rank_, " of ", num_ranks_, ": not all ranks came in ",
                                what, " within ", timeout_s,
                                " s: look at the other ranks' output"));
    }
    return status == cudaSuccess;
  };
  wait_until(is_over, poll);  // memory and stream stay if it throws: NCCL's kernel may use them
  cuda_check(cudaMemcpy(all, memory, all_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  cuda_check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  cuda_check(cudaFree(memory), "cudaFree");
}

NcclComm Communicator::get() const {
  require(comm_ != nullptr, "the communicator was closed");
  return comm_;
}

const std::shared_ptr<StreamOrder>& Communicator::order() {
  require(comm_ != nullptr, "the communicator was closed");
  if (order_ == nullptr) order_ = std::make_shared<StreamOrder>();
  return order_;
}

void Communicator::close() {
  order_.reset();
  if (comm_ == nullptr) return;
  nccl_->check(nccl_->comm_destroy(std::exchange(comm_, nullptr)), "ncclCommDestroy");
}

void Communicator::abort() {
  order_.reset();
  if (comm_ != nullptr) nccl_->comm_abort(std::exchange(comm_, nullptr));
}

}  // namespace ncclep
