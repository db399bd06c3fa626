// The native engine's low-latency mode.
#include <memory>
#include <optional>
#include <string>

#include "bindings/c_calls.h"

using namespace py::literals;

namespace ncclep::bindings {
namespace {

class LowLatency {
 public:
  LowLatency(Group& group, const ncclepLowLatencyConfig_t& config, const py::function& all_gather) {
    group.with_all_gather(
        all_gather, [&] { return ncclepLowLatencyCreate(&low_latency_, group.get(), &config); });
  }
  // Frees only local memory: closing is collective.
  ~LowLatency() { delete low_latency_; }
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  ncclepLowLatency_t get() const { return low_latency_; }

  ncclepLowLatencyBuffers_t buffers() const {
    ncclepLowLatencyBuffers_t buffers = NCCLEP_LOW_LATENCY_BUFFERS_INIT;
    check(ncclepLowLatencyGetBuffers(low_latency_, &buffers));
    return buffers;
  }

  void close() {
    if (low_latency_ == nullptr) return;
    const py::gil_scoped_release unlocked;
    check(ncclepLowLatencyDestroy(low_latency_));
    low_latency_ = nullptr;
  }

 private:
  ncclepLowLatency_t low_latency_ = nullptr;
};

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

void bind_low_latency(py::module_& module) {
  // Bytes of a rank's window, without a GPU.
  module.def(
      "low_latency_bytes",
      [](int num_ranks, int num_domains, int max_tokens, int hidden, int top_k,
         const std::string& payload, const std::string& dtype, int num_scales) {
        require(0 < num_domains && 0 < num_ranks && num_ranks % num_domains == 0, num_domains,
                " domains of ", num_ranks, " ranks: must be equally large");
        const native::LowLatencySizes sizes{max_tokens,        hidden,          top_k,
                                            dtype_of(payload), dtype_of(dtype), num_scales};
        return native::low_latency_window(num_ranks, num_domains, sizes).num_bytes();
      },
      py::kw_only(), "num_ranks"_a, "num_domains"_a, "max_tokens"_a, "hidden"_a, "top_k"_a,
      "payload"_a, "dtype"_a, "num_scales"_a);
  py::class_<LowLatency, std::shared_ptr<LowLatency>>(module, "LowLatencyHandle")
      .def(py::init([](const std::shared_ptr<Group>& group, int max_tokens, int hidden, int top_k,
                       const std::string& payload, const std::string& dtype, int num_scales,
                       const py::function& all_gather) {
             ncclepLowLatencyConfig_t config = NCCLEP_LOW_LATENCY_CONFIG_INIT;
             config.max_tokens = max_tokens;
             config.hidden = hidden;
             config.top_k = top_k;
             config.payload = c_dtype(dtype_of(payload));
             config.dtype = c_dtype(dtype_of(dtype));
             config.num_scales = num_scales;
             return std::make_shared<LowLatency>(*group, config, all_gather);
           }),
           "group"_a.none(false), py::kw_only(), "max_tokens"_a, "hidden"_a, "top_k"_a, "payload"_a,
           "dtype"_a, "num_scales"_a, "all_gather"_a)
      .def("close", &LowLatency::close)
      .def_property_readonly("rows", [](const LowLatency& of) { return number(of.buffers().rows); })
      .def_property_readonly("scales",
                             [](const LowLatency& of) { return number(of.buffers().scales); })
      .def_property_readonly("experts",
                             [](const LowLatency& of) { return number(of.buffers().experts); })
      .def_property_readonly("weights",
                             [](const LowLatency& of) { return number(of.buffers().weights); })
      .def(
          "dispatch",
          [](const LowLatency& low_latency, const Passed& x, const Passed& scales,
             const Passed& topk_idx, const Passed& weights, const Passed& counts, bool completes,
             int num_ctas, std::uintptr_t stream) {
            ncclepLowLatencyDispatch_t dispatch = NCCLEP_LOW_LATENCY_DISPATCH_INIT;
            dispatch.x = x;
            dispatch.scales = scales;
            dispatch.topk_idx = topk_idx;
            dispatch.weights = weights;
            dispatch.counts = counts;
            dispatch.completes = completes;
            dispatch.num_ctas = num_ctas;
            dispatch.stream = pointer(stream);
            check(ncclepLowLatencyDispatch(low_latency.get(), &dispatch));
          },
          py::kw_only(), "x"_a.none(false), "scales"_a, "topk_idx"_a, "weights"_a, "counts"_a,
          "completes"_a, "num_ctas"_a, "stream"_a)
      .def(
          "complete_dispatch",
          [](const LowLatency& low_latency, const Passed& counts, std::uintptr_t stream) {
            ncclepLowLatencyDispatch_t dispatch = NCCLEP_LOW_LATENCY_DISPATCH_INIT;
            dispatch.counts = counts;
            dispatch.stream = pointer(stream);
            check(ncclepLowLatencyDispatch(low_latency.get(), &dispatch));
          },
          py::kw_only(), "counts"_a, "stream"_a)
      .def(
          "combine",
          [](const LowLatency& low_latency, const Passed& y, const Passed& rows_of,
             const Passed& out, bool sends, bool completes, int num_ctas, std::uintptr_t stream) {
            ncclepLowLatencyCombine_t combine = NCCLEP_LOW_LATENCY_COMBINE_INIT;
            combine.y = y;
            combine.rows_of = rows_of;
            combine.out = out;
            combine.sends = sends;
            combine.completes = completes;
            combine.num_ctas = num_ctas;
            combine.stream = pointer(stream);
            check(ncclepLowLatencyCombine(low_latency.get(), &combine));
          },
          py::kw_only(), "y"_a, "rows_of"_a, "out"_a, "sends"_a, "completes"_a, "num_ctas"_a,
          "stream"_a);
}

}  // namespace ncclep::bindings
