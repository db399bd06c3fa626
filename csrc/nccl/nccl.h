// NCCL, found at run time: the functions that this extension calls, and the extension's own
// communicator.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/shared_library.h"
#include "common/stream_order.h"

namespace ncclep {

// The part of NCCL's documented C interface that is used here (NCCL 2.28 and later).
struct NcclUniqueId {
  char bytes[128];
};
struct NcclTeam {
  int num_ranks, rank, stride;
};
using NcclComm = void*;
using NcclWindow = void*;
using NcclResult = int;  // 0: success
enum NcclDataType {
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclBFloat16 = 9
};
constexpr int kNcclWindowCollSymmetric = 1;

class Nccl {
 public:
  // Opens libnccl.so.2 at `path`; if the process has already loaded it, uses that one.
  explicit Nccl(const std::string& path);

  const std::string& path() const { return library_.path(); }
  // 10000 * major + 100 * minor + patch.
  int version() const;
  NcclUniqueId unique_id() const;
  // Throws with the name of the call and NCCL's reason unless `result` is success.
  void check(NcclResult result, const char* call) const;

  NcclResult (*get_version)(int*);
  NcclResult (*get_unique_id)(NcclUniqueId*);
  NcclResult (*comm_init_rank)(NcclComm*, int, NcclUniqueId, int);
  NcclResult (*comm_destroy)(NcclComm);
  NcclResult (*comm_abort)(NcclComm);
  NcclTeam (*team_lsa)(NcclComm);
  NcclResult (*mem_alloc)(void**, std::size_t);
  NcclResult (*mem_free)(void*);
  NcclResult (*window_register)(NcclComm, void*, std::size_t, NcclWindow*, int);
  NcclResult (*window_deregister)(NcclComm, NcclWindow);
  const char* (*get_error_string)(NcclResult);
  const char* (*get_last_error)(NcclComm);

 private:
  SharedLibrary library_;
};

// One rank of a communicator over the expert-parallel group, on the current device.
//
// Construction and closing are collective.  An object that is not closed lives until the process
// ends: garbage collection is not collective.
class Communicator {
 public:
  Communicator(std::shared_ptr<Nccl> nccl, const NcclUniqueId& id, int num_ranks, int rank);

  // Destroys the communicator; everything made with it must be closed first.  Idempotent.
  void close();
  // Gives up without the other ranks; for a process that is about to end.
  void abort();

  const Nccl& nccl() const { return *nccl_; }
  NcclComm get() const;
  int num_ranks() const { return num_ranks_; }
  int rank() const { return rank_; }
  // Ranks that reach each other's memory by load and store (NVLink), this one included.
  int lsa_size() const { return lsa_size_; }
  // The order of the kernels that use this communicator's windows; created on the first call.
  const std::shared_ptr<StreamOrder>& order();

 private:
  std::shared_ptr<Nccl> nccl_;
  std::shared_ptr<StreamOrder> order_;
  NcclComm comm_ = nullptr;
  int num_ranks_, rank_, lsa_size_ = 1;
};

}  // namespace ncclep
