// NCCL, found at run time: the functions that this extension calls, and the extension's own
// communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/shared_library.h"
#include "common/stream_order.h"

namespace ncclep {

// The part of NCCL's documented C interface that is used here (NCCL 2.28 and later), for which no
// headers of NCCL's are needed; those of its device functions are network/gin.cu's alone.
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
  // Such as 2.30.7.
  std::string version_text() const;
  NcclUniqueId unique_id() const;
  // Throws with the name of the call and NCCL's reason unless `result` is success.
  void check(NcclResult result, const char* call) const;

  NcclResult (*get_version)(int*);
  NcclResult (*get_unique_id)(NcclUniqueId*);
  NcclResult (*comm_init_rank)(NcclComm*, int, NcclUniqueId, int);
  NcclResult (*comm_destroy)(NcclComm);
  NcclResult (*comm_abort)(NcclComm);
  NcclTeam (*team_lsa)(NcclComm);
  NcclResult (*all_gather)(const void*, void*, std::size_t, int, NcclComm, void*);
  NcclResult (*mem_alloc)(void**, std::size_t);
  NcclResult (*mem_free)(void*);
  NcclResult (*window_register)(NcclComm, void*, std::size_t, NcclWindow*, int);
  NcclResult (*window_deregister)(NcclComm, NcclWindow);
  const char* (*get_error_string)(NcclResult);
  const char* (*get_last_error)(NcclComm);
  // Since NCCL 2.29; null before.
  NcclResult (*get_peer_pointer)(NcclWindow, std::size_t, int, void**);
  // Since NCCL 2.29, null before; the structs are those of its headers.
  NcclResult (*query_properties)(NcclComm, void*);
  NcclResult (*device_comm_create)(NcclComm, const void*, void*);
  NcclResult (*device_comm_destroy)(NcclComm, const void*);

 private:
  SharedLibrary library_;
};

// One rank of a communicator over the expert-parallel group, on the current device.
//
// Construction and closing are collective.  An object that is not closed lives until the process
// ends: garbage collection is not collective.
class Communicator {
 public:
  Communicator(std::shared_ptr<Nccl> nccl, const NcclUniqueId& id, int num_ranks, int rank,
               int device);
  // The same on `device`, or on the current one if that is -1, and with a deadline, which NCCL's
  // own wait for the other ranks lacks, so a thread does the waiting.  `poll` is called now and
  // then, and may throw.  Throws PeerError when not all ranks have come in time; the thread then
  // keeps waiting.
  static std::shared_ptr<Communicator> connect(std::shared_ptr<Nccl> nccl, const NcclUniqueId& id,
                                               int num_ranks, int rank, int device,
                                               double timeout_s, const std::function<void()>& poll);

  // Gathers `num_bytes` bytes of every rank's host memory into `all`, by rank, through NCCL, on a
  // separate stream.  Collective.  Throws PeerError when not all ranks have come in time; `what`
  // names the call in errors.
  void all_gather(const void* mine, std::size_t num_bytes, void* all, const char* what,
                  double timeout_s, const std::function<void()>& poll) const;

  // Destroys the communicator; everything made with it must be closed first.  Idempotent.
  void close();
  // Gives up without the other ranks; for a process that is about to end.
  void abort();

  const Nccl& nccl() const { return *nccl_; }
  const std::shared_ptr<Nccl>& shared_nccl() const { return nccl_; }
  NcclComm get() const;
  int num_ranks() const { return num_ranks_; }
  int rank() const { return rank_; }
  // The GPU that it was made on; -1: CUDA had none.
  int device() const { return device_; }
  // Ranks that reach each other's memory by load and store (NVLink), this one included: its domain.
  int lsa_size() const { return lsa_.num_ranks; }
  int num_domains() const { return num_ranks_ / lsa_.num_ranks; }
  // The rank of this communicator with this local rank in this one's domain.
  int rank_in_domain(int local_rank) const {
    return rank_ + (local_rank - lsa_.rank) * lsa_.stride;
  }
  // A different number for each set of windows; the same on all ranks, which make them in one
  // order.
  std::uint64_t next_generation() { return ++generation_; }
  // The order of the kernels that use this communicator's windows; created on the first call.
  const std::shared_ptr<StreamOrder>& order();

 private:
  std::shared_ptr<Nccl> nccl_;
  std::shared_ptr<StreamOrder> order_;
  NcclComm comm_ = nullptr;
  std::uint64_t generation_ = 0;
  int num_ranks_, rank_;
  NcclTeam lsa_ = {1, 0, 1};
  int device_;
};

}  // namespace ncclep
