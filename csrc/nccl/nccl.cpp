#include "nccl/nccl.h"

#include <utility>

namespace ncclep {

Nccl::Nccl(const std::string& path) : library_(path) {
  library_.find("ncclGetVersion", get_version);
  library_.find("ncclGetUniqueId", get_unique_id);
  library_.find("ncclCommInitRank", comm_init_rank);
  library_.find("ncclCommDestroy", comm_destroy);
  library_.find("ncclCommAbort", comm_abort);
  library_.find("ncclTeamLsa", team_lsa);
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
