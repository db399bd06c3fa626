// Communicators and groups of the C interface.
#include <cuda_runtime.h>

#include "c_interface/handles.h"
#include "common/cuda.h"
#include "native/host/call.h"
#include "native/rows/cta_roles.h"

namespace native = ncclep::native;
using namespace ncclep::c_interface;
using ncclep::Communicator;
using ncclep::Nccl;
using ncclep::require;

static_assert(NCCLEP_MAX_RANKS == native::kMaxRanks && NCCLEP_MAX_TOP_K == native::kMaxTopK);
static_assert(NCCLEP_MAX_LOCAL_RANKS == native::kMaxLocalRanks &&
              NCCLEP_MAX_LOCAL_EXPERTS == native::kMaxLocalExperts &&
              NCCLEP_MAX_DOMAINS == native::kMaxDomains);
static_assert(NCCLEP_MAX_TOKENS == native::kMaxTokens && NCCLEP_MAX_EXPERTS == native::kMaxExperts);
static_assert(NCCLEP_LOW_LATENCY_TOKENS == native::kLowLatencyTokens);
static_assert(sizeof(ncclepUniqueId_t) == sizeof(ncclep::NcclUniqueId));
static_assert(ncclepFloat64 == static_cast<int>(ncclep::DType::kFloat64) &&
              ncclepBfloat16 == static_cast<int>(ncclep::DType::kBFloat16) &&
              ncclepNumTypes == ncclepFloat64 + 1);
static_assert(ncclepPhaseLowLatencyCombine == static_cast<int>(native::Phase::kLowLatencyCombine));
static_assert(ncclepReasonOutOfTurn == static_cast<int>(native::Reason::kOutOfTurn));

namespace {

std::shared_ptr<Nccl> open_nccl(const char* path) {
  return std::make_shared<Nccl>(path == nullptr ? "libnccl.so.2" : path);
}

native::Group& group_at(ncclepGroup_t group) { return *at(group, "native group").group; }

std::string text_of(const native::Failure& failure) {
  return ncclep::join_text(
      "rank ", failure.peer, " in ", native::name_of(failure.phase), ", operation ", failure.epoch,
      " (deadline ", failure.deadline_s, " s): ", native::name_of(failure.reason),
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
    native::Group& windows = group_at(group);
    const ncclepShape_t given = read(shape, "ncclepShape_t");
    windows.reserve(given.num_tokens, given.top_k, given.row_bytes, stream_of(stream),
                    all_gather_of(*group));
  });
}

ncclepResult_t ncclepGroupBegin(ncclepGroup_t group, double timeout_s, const ncclepShape_t* shape,
                                int* fits) {
  return guarded([&] {
    native::Group& begun = group_at(group);
    const auto failure = begun.failure();
    begun.set_timeout(timeout_s);  // even then, for the end of the group
    if (failure) throw ncclep::PeerError(text_of(*failure));
    if (shape == nullptr) return;
    const ncclepShape_t given = read(shape, "ncclepShape_t");
    out(fits, "fits") = begun.fits(given.num_tokens, given.top_k, given.row_bytes);
  });
}

ncclepResult_t ncclepGroupGetInfo(ncclepGroup_t group, ncclepGroupInfo_t* info) {
  return guarded([&] {
    const native::Group& of = group_at(group);
    ncclepGroupInfo_t found = NCCLEP_GROUP_INFO_INIT;
    found.num_ranks = of.communicator()->num_ranks();
    found.rank = of.communicator()->rank();
    found.num_experts = of.num_experts();
    found.max_tokens = of.max_tokens();
    found.max_top_k = of.max_top_k();
    found.row_bytes = of.row_bytes();
    found.num_bytes = of.num_bytes();
    found.was_captured = of.was_captured();
    found.growth = of.growth().c_str();
    found.num_token_routes = of.num_token_routes();
    write(found, info, "ncclepGroupInfo_t");
  });
}

ncclepResult_t ncclepGroupWait(ncclepGroup_t group) {
  return guarded([&] {
    const native::Group& waited = group_at(group);
    waited.wait_until_idle(poll_of(group->config.poll, group->config.user));
  });
}

ncclepResult_t ncclepGroupGetFailure(ncclepGroup_t group, ncclepFailure_t* failure) {
  return guarded([&] {
    ncclepFailure_t found = NCCLEP_FAILURE_INIT;
    if (const auto of = group_at(group).failure()) {
      found.reason = static_cast<ncclepReason_t>(of->reason);
      found.phase = static_cast<ncclepPhase_t>(of->phase);
      found.peer = of->peer;
      found.operation = of->epoch;
      found.deadline_s = of->deadline_s;
      found.own_call = of->own_call;
      found.peer_call = of->peer_call;
    }
    write(found, failure, "ncclepFailure_t");
  });
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
    refusing.refuse(static_cast<native::Phase>(phase), stream_of(stream));
  });
}

ncclepResult_t ncclepGroupCopyWaitedNs(ncclepGroup_t group, const ncclepTensor_t* out,
                                       void* stream) {
  return guarded([&] { group_at(group).copy_waited_ns(tensor_at(out, "out"), stream_of(stream)); });
}

ncclepResult_t ncclepGroupDestroy(ncclepGroup_t group) {
  return guarded([&] {
    group_at(group).close();
    delete group;
  });
}

ncclepResult_t ncclepMinSms(int num_ranks, int* num_sms) {
  return guarded([&] {
    require(0 < num_ranks && num_ranks <= NCCLEP_MAX_RANKS, num_ranks, " ranks: from 1 to ",
            NCCLEP_MAX_RANKS);
    out(num_sms, "num_sms") = native::min_ctas(num_ranks);
  });
}
