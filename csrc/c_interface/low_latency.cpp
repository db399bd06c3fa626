// Low-latency mode of the C interface.
#include "c_interface/handles.h"

namespace native = ncclep::native;
using namespace ncclep::c_interface;
using ncclep::read;
using ncclep::write;

namespace {

native::LowLatency& low_latency_at(ncclepLowLatency_t low_latency) {
  return *at(low_latency, "low-latency object").low_latency;
}

}  // namespace

ncclepResult_t ncclepLowLatencyCreate(ncclepLowLatency_t* low_latency, ncclepGroup_t group,
                                      const ncclepLowLatencyConfig_t* config) {
  return guarded([&] {
    out(low_latency, "low_latency") = nullptr;
    const ncclepGroup& owner = at(group, "native group");
    *low_latency = new ncclepLowLatency{native::LowLatency::make(
        owner.group, read(config, "ncclepLowLatencyConfig_t"), all_gather_of(owner))};
  });
}

ncclepResult_t ncclepLowLatencyGetBuffers(ncclepLowLatency_t low_latency,
                                          ncclepLowLatencyBuffers_t* buffers) {
  return guarded(
      [&] { write(low_latency_at(low_latency).buffers(), buffers, "ncclepLowLatencyBuffers_t"); });
}

ncclepResult_t ncclepLowLatencyDispatch(ncclepLowLatency_t low_latency,
                                        const ncclepLowLatencyDispatch_t* dispatch) {
  return guarded(
      [&] { low_latency_at(low_latency).dispatch(read(dispatch, "ncclepLowLatencyDispatch_t")); });
}

ncclepResult_t ncclepLowLatencyCombine(ncclepLowLatency_t low_latency,
                                       const ncclepLowLatencyCombine_t* combine) {
  return guarded(
      [&] { low_latency_at(low_latency).combine(read(combine, "ncclepLowLatencyCombine_t")); });
}

ncclepResult_t ncclepLowLatencyDestroy(ncclepLowLatency_t low_latency) {
  return guarded([&] {
    low_latency_at(low_latency).close();
    delete low_latency;
  });
}
