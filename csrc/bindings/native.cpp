// The native engine: groups, plans, steps, and its low-latency mode.
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "native/host/call.h"
#include "native/host/group.h"
#include "native/low_latency/host.h"
#include "native/rows/cta_roles.h"
#include "nccl/nccl.h"

namespace py = pybind11;
using namespace py::literals;

namespace ncclep::bindings {
namespace {

int num_chunks_of(int most_tokens) {
  require(most_tokens >= 0, most_tokens, " tokens: at least 0");
  return native::num_chunks_of(most_tokens);
}

void bind_high_throughput(py::module_& module) {
  using native::Failure;
  using native::Group;
  using native::Plan;
  using native::PlanSizes;
  py::class_<PlanSizes>(module, "NativePlanSizes")
      .def_readonly("num_rows", &PlanSizes::num_rows)
      .def_readonly("num_pairs", &PlanSizes::num_pairs)
      .def_readonly("num_assignments", &PlanSizes::num_assignments)
      .def_readonly("bad_ranks", &PlanSizes::bad_ranks);
  py::class_<Failure>(module, "NativeFailure")
      .def_property_readonly("reason",
                             [](const Failure& failure) { return name_of(failure.reason); })
      .def_property_readonly("phase", [](const Failure& failure) { return name_of(failure.phase); })
      .def_readonly("peer", &Failure::peer)
      .def_readonly("epoch", &Failure::epoch)
      .def_readonly("deadline_s", &Failure::deadline_s)
      .def_readonly("own_call", &Failure::own_call)
      .def_readonly("peer_call", &Failure::peer_call);
  py::class_<Plan>(module, "NativePlan")
      .def(py::init([](const Tensor& counts, const Tensor& token_routes, int most_tokens, int top_k,
                       std::uint64_t number) {
             return Plan{counts, token_routes, num_chunks_of(most_tokens), top_k, number};
           }),
           "counts"_a, "token_routes"_a, "most_tokens"_a, "top_k"_a, "number"_a);
  py::class_<Group, std::shared_ptr<Group>>(module, "NativeGroup")
      .def(py::init<std::shared_ptr<Communicator>, int, double>(), "communicator"_a.none(false),
           "num_experts"_a, "timeout_s"_a)
      .def("fits", &Group::fits, "max_tokens"_a, "top_k"_a, "row_bytes"_a)
      .def("allocate", &Group::allocate, "max_tokens"_a, "top_k"_a, "row_bytes"_a, Unlocked())
      .def("open", &Group::open, Unlocked())
      .def("clear", &Group::clear, Unlocked())
      .def("drop", &Group::drop, Unlocked())
      .def("close", &Group::close, Unlocked())
      .def_property_readonly("windows", &Group::windows)
      .def_property_readonly("generation", &Group::generation)
      .def_property_readonly("was_captured", &Group::was_captured)
      .def_property("timeout_s", &Group::timeout, &Group::set_timeout)
      .def_property_readonly("num_bytes", &Group::num_bytes)
      .def_property_readonly("max_tokens", &Group::max_tokens)
      .def_property_readonly("max_top_k", &Group::max_top_k)
      .def_property_readonly("row_bytes", &Group::row_bytes)
      .def(
          "routes_size",
          [](const Group& group, std::int64_t max_pairs, std::int64_t max_assignments,
             int most_tokens) {
            return group.routes_size(max_pairs, max_assignments, num_chunks_of(most_tokens));
          },
          "max_pairs"_a, "max_assignments"_a, "most_tokens"_a)
      .def("plan", &Group::plan, "plan"_a, "topk_idx"_a, "alignment"_a, "max_recv_rows"_a, "kept"_a,
           "lacked"_a, "max_pairs"_a, "max_assignments"_a, "routes"_a, "num_sms"_a, "stream"_a)
      .def("plan_receive", &Group::plan_receive, "plan"_a, "max_pairs"_a, "max_assignments"_a,
           "routes"_a, "num_sms"_a, "stream"_a)
      .def(
          "wait_for_sizes",
          [](const Group& group, Plan& plan, std::uint32_t ticket, const Tensor& rows_of_expert,
             std::uintptr_t stream) {
            return group.wait_for_sizes(plan, ticket, rows_of_expert, stream, raise_signals);
          },
          "plan"_a, "ticket"_a, "rows_of_expert"_a, "stream"_a, Unlocked())
      .def(
          "wait_until_idle", [](const Group& group) { group.wait_until_idle(raise_signals); },
          Unlocked())
      .def("copy_waited_ns", &Group::copy_waited_ns, "out"_a, "stream"_a)
      .def("bad_ranks", &Group::bad_ranks, "forget"_a)
      .def("dispatch", &Group::dispatch, "plan"_a, "x"_a, "w"_a, "rows"_a, "row_w"_a, "num_sms"_a,
           "stream"_a)
      .def("sums_size", &Group::sums_size, "plan"_a, "num_sms"_a, "row_bytes"_a)
      .def("combine", &Group::combine, "plan"_a, "y"_a, "w"_a, "sums"_a, "out"_a, "topk_w"_a,
           "num_sms"_a, "stream"_a)
      .def(
          "refuse",
          [](Group& group, const std::string& phase, std::uintptr_t stream) {
            group.refuse(native::phase_of(phase), stream);
          },
          "phase"_a, "stream"_a)
      .def("failure", &Group::failure)
      .def("bad_low_latency", &Group::bad_low_latency, "forget"_a);
  module.def(
      "call_values",
      [](std::uint64_t call) {
        py::dict values;
        for (const auto& [name, value] : native::values_of(call)) {
          values[py::str(name)] = value;
          if (name == "phase") values["phase"] = name_of(static_cast<native::Phase>(value));
          if (name == "dtype") values["dtype"] = name_of(static_cast<DType>(value));
        }
        return values;
      },
      "call"_a);
  module.def(
      "split_dispatch",
      [](int num_ctas) {
        const auto split = native::split_dispatch(num_ctas);
        return std::tuple(split.staging, split.pulling);
      },
      "num_ctas"_a);
  module.def("num_phases_of", &native::num_phases_of, "most_tokens"_a, "row_bytes"_a);
  module.def(
      "split_combine",
      [](int num_ctas, int num_ranks, int top_k, int row_bytes) {
        const auto split = native::split_combine(num_ctas, num_ranks, top_k, row_bytes);
        return std::tuple(split.adding, split.sending, split.summing);
      },
      "num_ctas"_a, "num_ranks"_a, "top_k"_a, "row_bytes"_a);
  module.def("native_min_sms", &native::min_ctas, "num_ranks"_a);
  module.attr("MAX_RANKS") = native::kMaxRanks;
  module.attr("MAX_EXPERTS") = native::kMaxExperts;
  module.attr("MAX_TOKENS") = native::kMaxTokens;
  module.attr("MAX_TOP_K") = native::kMaxTopK;
  module.attr("LOW_LATENCY_TOKENS") = native::kLowLatencyTokens;
}

void bind_low_latency(py::module_& module) {
  using native::Group;
  using native::LowLatency;
  using native::LowLatencySizes;
  py::class_<LowLatency, std::shared_ptr<LowLatency>>(module, "NativeLowLatency")
      .def(py::init([](std::shared_ptr<Group> group, int max_tokens, int hidden, int top_k,
                       const std::string& payload, const std::string& dtype, int num_scales,
                       int generation) {
             const LowLatencySizes sizes{max_tokens,        hidden,          top_k,
                                         dtype_of(payload), dtype_of(dtype), num_scales};
             py::gil_scoped_release unlocked;
             return std::make_shared<LowLatency>(std::move(group), sizes, generation);
           }),
           "group"_a.none(false), py::kw_only(), "max_tokens"_a, "hidden"_a, "top_k"_a, "payload"_a,
           "dtype"_a, "num_scales"_a, "generation"_a)
      .def("open", &LowLatency::open, Unlocked())
      .def("clear", &LowLatency::clear, Unlocked())
      .def("drop", &LowLatency::drop, Unlocked())
      .def("close", &LowLatency::close, Unlocked())
      .def_property_readonly("windows", &LowLatency::windows)
      .def_property_readonly("generation", &LowLatency::generation)
      .def_property_readonly("num_bytes", &LowLatency::num_bytes)
      .def_property_readonly("rows", &LowLatency::rows)
      .def_property_readonly("scales", &LowLatency::scales)
      .def_property_readonly("experts", &LowLatency::experts)
      .def_property_readonly("weights", &LowLatency::weights)
      .def("dispatch", &LowLatency::dispatch, "x"_a, "scales"_a, "topk_idx"_a, "weights"_a,
           "counts"_a, "completes"_a, "num_ctas"_a, "stream"_a)
      .def("complete_dispatch", &LowLatency::complete_dispatch, "counts"_a, "stream"_a)
      .def("combine", &LowLatency::combine, "y"_a, "rows_of"_a, "out"_a, "sends"_a, "completes"_a,
           "num_ctas"_a, "stream"_a);
}

}  // namespace

void bind_native(py::module_& module) {
  bind_high_throughput(module);
  bind_low_latency(module);
}

}  // namespace ncclep::bindings
