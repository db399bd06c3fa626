// Communicators and groups of the C interface.
#include <cuda_runtime.h>

#include "c_interface/handles.h"
#include "common/cuda.h"
#include "native/host/call_signature.h"
#include "native/rows/cta_roles.h"

namespace native = ncclep::native;
using namespace ncclep::c_interface;
using ncclep::Communicator;
using ncclep::Nccl;
using ncclep::number_of;
using ncclep::read;
using ncclep::require;
using ncclep::write;

static_assert(NCCLEP_MAX_RANKS == native::kMaxRanks && NCCLEP_MAX_TOP_K == native::kMaxTopK);
static_assert(NCCLEP_MAX_LOCAL_RANKS == native::kMaxLocalRanks &&
              NCCLEP_MAX_LOCAL_EXPERTS == native::kMaxLocalExperts &&
              NCCLEP_MAX_DOMAINS == native::kMaxDomains);
static_assert(NCCLEP_MAX_TOKENS == native::kMaxTokens && NCCLEP_MAX_EXPERTS == native::kMaxExperts);
static_assert(NCCLEP_LOW_LATENCY_TOKENS == native::kLowLatencyTokens);
static_assert(sizeof(ncclepUniqueId_t) == sizeof(ncclep::NcclUniqueId));

namespace {

std::shared_ptr<Nccl> open_nccl(const char* path) {
  return std::make_shared<Nccl>(path == nullptr ? "libnccl.so.2" : path);
}

std::string text_of(const ncclepFailure_t& failure) {
  return ncclep::join_text(
      "rank ", failure.peer, " in ", native::name_of(static_cast<native::Phase>(failure.phase)),
      ", operation ", failure.operation, " (deadline ", failure.deadline_s,
      " s): ", native::name_of(static_cast<native::Reason>(failure.reason)),
      "; look at the other ranks' output. What this group has returned since is NaN");
}

}  // namespace

ncclepResult_t ncclepGetUniqueId(ncclepUniqueId_t* id, const char* nccl_path) {
  return guarded([&] {
    const ncclep::NcclUniqueId made = open_nccl(nccl_path)->unique_id();
    std::memcpy(out(id, "id").bytes, made.bytes, sizeof(made.bytes));
  });
}

ncclepResult_t ncclepCommCreate(ncclepComm_t* comm, const ncclepCommConfig_t* config) {
  return guarded([&] {
    out(comm, "comm") = nullptr;
    const ncclepCommConfig_t given = read(config, "ncclepCommConfig_t");
    require(0 <= given.rank && given.rank < given.num_ranks, "rank ", given.rank, " of ",
            given.num_ranks);
    if (given.device != -1) ncclep::cuda_check(cudaSetDevice(given.device), "cudaSetDevice");
    ncclep::NcclUniqueId id;
    std::memcpy(id.bytes, given.unique_id.bytes, sizeof(id.bytes));
    *comm = new ncclepComm{Communicator::connect(open_nccl(given.nccl_path), id, given.num_ranks,
                                                 given.rank, given.device, given.timeout_s,
                                                 poll_of(given.poll, given.user))};
  });
}

ncclepResult_t ncclepCommDestroy(ncclepComm_t comm) {
  return guarded([&] {
    at(comm, "communicator").communicator->close();
    delete comm;
  });
}

ncclepResult_t ncclepCommAbort(ncclepComm_t comm) {
  return guarded([&] {
    at(comm, "communicator").communicator->abort();
    delete comm;
  });
}

ncclepResult_t ncclepGroupCreate(ncclepGroup_t* group, ncclepComm_t comm,
                                 const ncclepGroupConfig_t* config) {
  return guarded([&] {
    out(group, "group") = nullptr;
    const ncclepGroupConfig_t given = read(config, "ncclepGroupConfig_t");
    *group = new ncclepGroup{std::make_shared<native::Group>(at(comm, "communicator").communicator,
                                                             given.num_experts, given.timeout_s),
                             given};
  });
}

ncclepResult_t ncclepGroupReserve(ncclepGroup_t group, const ncclepShape_t* shape, void* stream) {
  return guarded([&] {
    group_at(group).reserve(read(shape, "ncclepShape_t"), number_of(stream), all_gather_of(*group));
  });
}

ncclepResult_t ncclepGroupBegin(ncclepGroup_t group, double timeout_s, const ncclepShape_t* shape,
                                int* fits) {
  return guarded([&] {
    native::Group& begun = group_at(group);
    begun.set_timeout(timeout_s);  // even of a group that has failed, for its end
    const ncclepFailure_t failure = begun.failure();
    if (failure.reason != ncclepReasonNone) throw ncclep::PeerError(text_of(failure));
    if (shape != nullptr) out(fits, "fits") = begun.fits(read(shape, "ncclepShape_t"));
  });
}

ncclepResult_t ncclepGroupGetInfo(ncclepGroup_t group, ncclepGroupInfo_t* info) {
  return guarded([&] { write(group_at(group).info(), info, "ncclepGroupInfo_t"); });
}

ncclepResult_t ncclepGroupWait(ncclepGroup_t group) {
  return guarded([&] {
    const native::Group& waited = group_at(group);
    waited.wait_until_idle(poll_of(group->config.poll, group->config.user));
  });
}

ncclepResult_t ncclepGroupGetFailure(ncclepGroup_t group, ncclepFailure_t* failure) {
  return guarded([&] { write(group_at(group).failure(), failure, "ncclepFailure_t"); });
}

ncclepResult_t ncclepGroupBadRoutings(ncclepGroup_t group, int forget, uint32_t* plans,
                                      uint32_t* low_latency) {
  return guarded([&] {
    native::Group& of = group_at(group);
    if (plans != nullptr) of.bad_ranks(forget != 0, plans);
    if (low_latency != nullptr) of.bad_low_latency(forget != 0, low_latency);
  });
}

ncclepResult_t ncclepGroupRefuse(ncclepGroup_t group, ncclepPhase_t phase, void* stream) {
  return guarded([&] {
    native::Group& refusing = group_at(group);
    require(ncclepPhaseNone < phase && phase <= ncclepPhaseLowLatencyCombine, "phase ",
            static_cast<int>(phase), ": one of ncclepPhase_t but ncclepPhaseNone");
    refusing.refuse(static_cast<native::Phase>(phase), number_of(stream));
  });
}

ncclepResult_t ncclepGroupCopyWaitedNs(ncclepGroup_t group, const ncclepTensor_t* out,
                                       void* stream) {
  return guarded([&] { group_at(group).copy_waited_ns(out, number_of(stream)); });
}

ncclepResult_t ncclepGroupDestroy(ncclepGroup_t group) {
  return guarded([&] {
    group_at(group).close();
    delete group;
  });
}

ncclepResult_t ncclepMinSms(int num_ranks, int* num_sms) {
  return guarded([&] { out(num_sms, "num_sms") = native::min_ctas(num_ranks); });
}
