#include "nccl/nccl.h"

#include <cuda_runtime.h>

#include <utility>

#include "common/cuda.h"
#include "common/pause.h"
#include "nccl/run_with_deadline.h"

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
  library_.find_if_any("ncclGetPeerDevicePointer", get_peer_pointer);
  library_.find_if_any("ncclCommQueryProperties", query_properties);
  library_.find_if_any("ncclDevCommCreate", device_comm_create);
  library_.find_if_any("ncclDevCommDestroy", device_comm_destroy);
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
                           int rank, int device)
    : nccl_(std::move(nccl)), num_ranks_(num_ranks), rank_(rank), device_(device) {
  require(0 <= rank && rank < num_ranks, "rank ", rank, " of ", num_ranks);
  nccl_->check(nccl_->comm_init_rank(&comm_, num_ranks, id, rank), "ncclCommInitRank");
  lsa_ = nccl_->team_lsa(comm_);
}

std::shared_ptr<Communicator> Communicator::connect(std::shared_ptr<Nccl> nccl,
                                                    const NcclUniqueId& id, int num_ranks, int rank,
                                                    int device, double timeout_s,
                                                    const std::function<void()>& poll) {
  // Without a device NCCL reports the error.
  if (device == -1 && cudaGetDevice(&device) != cudaSuccess) device = -1;
  const auto made = std::make_shared<std::shared_ptr<Communicator>>();
  const auto make = [=] {
    *made = std::make_shared<Communicator>(nccl, id, num_ranks, rank, device);
  };
  const std::string late = join_text(
      "no communicator over the ", num_ranks, " ranks of the expert-parallel group within ",
      timeout_s, " s: look at the other ranks' output, or at NCCL's own with NCCL_DEBUG=INFO");
  run_with_deadline(make, late, device, timeout_s, poll);
  return *made;
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
