// Low-latency mode of the C interface.
#include "c_interface/handles.h"

namespace native = ncclep::native;
using namespace ncclep::c_interface;

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
    const ncclepLowLatencyConfig_t given = read(config, "ncclepLowLatencyConfig_t");
    const native::LowLatencySizes sizes{given.max_tokens,      given.hidden,
                                        given.top_k,           dtype_at(given.payload),
                                        dtype_at(given.dtype), given.num_scales};
    *low_latency =
        new ncclepLowLatency{native::LowLatency::make(owner.group, sizes, all_gather_of(owner))};
  });
}

ncclepResult_t ncclepLowLatencyGetBuffers(ncclepLowLatency_t low_latency,
                                          ncclepLowLatencyBuffers_t* buffers) {
  return guarded([&] {
    const native::LowLatency& of = low_latency_at(low_latency);
    ncclepLowLatencyBuffers_t found = NCCLEP_LOW_LATENCY_BUFFERS_INIT;
    found.rows = reinterpret_cast<void*>(of.rows());
    found.scales = reinterpret_cast<float*>(of.scales());
    found.experts = reinterpret_cast<int32_t*>(of.experts());
    found.weights = reinterpret_cast<float*>(of.weights());
    found.num_bytes = of.num_bytes();
    write(found, buffers, "ncclepLowLatencyBuffers_t");
  });
}

ncclepResult_t ncclepLowLatencyDispatch(ncclepLowLatency_t low_latency,
                                        const ncclepLowLatencyDispatch_t* dispatch) {
  return guarded([&] {
    native::LowLatency& of = low_latency_at(low_latency);
    const ncclepLowLatencyDispatch_t given = read(dispatch, "ncclepLowLatencyDispatch_t");
    const ncclep::Tensor counts = tensor_at(given.counts, "counts");
    if (given.x == nullptr) {
      of.complete_dispatch(counts, stream_of(given.stream));
      return;
    }
    of.dispatch(tensor_at(given.x, "x"), optional_tensor(given.scales, "scales"),
                tensor_at(given.topk_idx, "topk_idx"), tensor_at(given.weights, "weights"), counts,
                given.completes != 0, given.num_ctas, stream_of(given.stream));
  });
}

ncclepResult_t ncclepLowLatencyCombine(ncclepLowLatency_t low_latency,
                                       const ncclepLowLatencyCombine_t* combine) {
  return guarded([&] {
    native::LowLatency& of = low_latency_at(low_latency);
    const ncclepLowLatencyCombine_t given = read(combine, "ncclepLowLatencyCombine_t");
    of.combine(tensor_at(given.y, "y"), optional_tensor(given.rows_of, "rows_of"),
               tensor_at(given.out, "out"), given.sends != 0, given.completes != 0, given.num_ctas,
               stream_of(given.stream));
  });
}

ncclepResult_t ncclepLowLatencyDestroy(ncclepLowLatency_t low_latency) {
  return guarded([&] {
    low_latency_at(low_latency).close();
    delete low_latency;
  });
}
