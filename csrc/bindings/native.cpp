// The native engine's groups, plans and steps, and its low-latency mode.
//
// Calls fill the C interface's structs, and call what that interface calls.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "native/host/call_signature.h"
#include "native/host/checks.h"
#include "native/host/group.h"
#include "native/low_latency/host.h"
#include "native/rows/cta_roles.h"

using namespace py::literals;

namespace ncclep::bindings {
namespace {

using native::Group;
using native::LowLatency;
using native::Plan;
using OptionalTensor = std::optional<Tensor>;
// Held so that pybind11 refuses an object that was never initialised.
using PlanPointer = std::shared_ptr<Plan>;

const ncclepTensor_t* address(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }

void* address(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// Has Python's `gather(mine, what, timeout_s)` answer, for as long as the call that it is for.
native::AllGather all_gather_of(const py::function& gather, const Group& group) {
  return [&](const void* mine, std::size_t num_bytes, void* all, const char* what) {
    const py::gil_scoped_acquire locked;
    const py::bytes received =
        gather(py::bytes(static_cast<const char*>(mine), num_bytes), what, group.timeout());
    const std::string_view theirs = received;
    const std::size_t expected = group.communicator()->num_ranks() * num_bytes;
    require(theirs.size() == expected, "all_gather returned ", theirs.size(), " bytes: ", expected,
            " were expected");
    std::memcpy(all, theirs.data(), expected);
  };
}

// What has grown, such as "tokens 0 -> 128"; None when the windows were large enough.
std::optional<std::string> reserve(Group& group, int num_tokens, int top_k, std::size_t row_bytes,
                                   std::uintptr_t stream, const py::function& all_gather) {
  const ncclepShape_t shape{sizeof(shape), num_tokens, top_k, row_bytes};
  const std::size_t num_bytes = group.num_bytes();
  {
    const py::gil_scoped_release unlocked;
    group.reserve(shape, stream, all_gather_of(all_gather, group));
  }
  if (group.num_bytes() == num_bytes) return std::nullopt;
  return group.info().growth;
}

// Whether the windows are large enough; None when the group has failed.
std::optional<bool> begin(Group& group, double timeout_s, int num_tokens, int top_k,
                          std::size_t row_bytes) {
  group.set_timeout(timeout_s);
  if (group.failure().reason != ncclepReasonNone) return std::nullopt;
  return group.fits({sizeof(ncclepShape_t), num_tokens, top_k, row_bytes});
}

PlanPointer plan(Group& group, const Tensor& topk_idx, int most_tokens, std::uint64_t number,
                 int alignment, std::int64_t max_recv_rows, const Tensor& counts,
                 const Tensor& token_routes, const Tensor& routes, std::int64_t max_pairs,
                 std::int64_t max_assignments, const OptionalTensor& kept,
                 const OptionalTensor& lacked, int num_sms, std::uintptr_t stream,
                 bool leaves_unused) {
  return std::make_shared<Plan>(
      group.plan({sizeof(ncclepPlanConfig_t), &topk_idx, most_tokens, number, alignment,
                  max_recv_rows, &counts, &token_routes, &routes, max_pairs, max_assignments,
                  address(kept), address(lacked), num_sms, address(stream), leaves_unused}));
}

using Step = void (Group::*)(const Plan&, const ncclepRows_t&);

template <Step kStep>
void move_rows(Group& group, const PlanPointer& plan, const Tensor& tokens,
               const OptionalTensor& topk_w, const Tensor& rows, const OptionalTensor& row_w,
               const OptionalTensor& sums, int num_sms, std::uintptr_t stream) {
  (group.*kStep)(*plan, {sizeof(ncclepRows_t), &tokens, address(topk_w), &rows, address(row_w),
                         address(sums), num_sms, address(stream)});
}

template <void (Group::*kRead)(bool, std::uint32_t*)>
std::vector<int> ranks_of(Group& group, bool forget) {
  std::uint32_t words[native::kRankWords];
  (group.*kRead)(forget, words);
  std::vector<int> ranks;
  for (int rank = 0; rank < native::kMaxRanks; ++rank) {
    if (words[rank / 32] >> rank % 32 & 1) ranks.push_back(rank);
  }
  return ranks;
}

void bind_results(py::module_& module) {
  py::class_<ncclepPlanSizes_t>(module, "PlanSizes")
      .def_readonly("num_rows", &ncclepPlanSizes_t::num_rows)
      .def_readonly("num_pairs", &ncclepPlanSizes_t::num_pairs)
      .def_readonly("num_assignments", &ncclepPlanSizes_t::num_assignments)
      .def_readonly("first_bad_rank", &ncclepPlanSizes_t::first_bad_rank)
      .def_readonly("has_room", &ncclepPlanSizes_t::has_room);
  py::class_<ncclepFailure_t>(module, "GroupFailure")
      .def_property_readonly("reason",
                             [](const ncclepFailure_t& failure) {
                               return name_of(static_cast<native::Reason>(failure.reason));
                             })
      .def_property_readonly("phase",
                             [](const ncclepFailure_t& failure) {
                               return name_of(static_cast<native::Phase>(failure.phase));
                             })
      .def_readonly("peer", &ncclepFailure_t::peer)
      .def_readonly("operation", &ncclepFailure_t::operation)
      .def_readonly("deadline_s", &ncclepFailure_t::deadline_s)
      .def_readonly("own_call", &ncclepFailure_t::own_call)
      .def_readonly("peer_call", &ncclepFailure_t::peer_call);
}

void bind_group(py::module_& module) {
  py::class_<Plan, PlanPointer>(module, "PlanHandle");
  py::class_<Group, std::shared_ptr<Group>>(module, "GroupHandle")
      .def(py::init<std::shared_ptr<Communicator>, int, double>(), "communicator"_a.none(false),
           "num_experts"_a, "timeout_s"_a)
      .def("reserve", &reserve, py::kw_only(), "num_tokens"_a, "top_k"_a, "row_bytes"_a, "stream"_a,
           "all_gather"_a)
      .def("begin", &begin, "timeout_s"_a, "num_tokens"_a, "top_k"_a, "row_bytes"_a)
      .def("release_windows", &Group::release_windows, Unlocked())
      .def("close", &Group::close, Unlocked())
      // Rows of a plan's token routes.
      .def_property_readonly("num_token_routes",
                             [](const Group& group) { return group.info().num_token_routes; })
      .def_property_readonly("num_bytes", &Group::num_bytes)
      .def_property_readonly("max_tokens",
                             [](const Group& group) { return group.info().max_tokens; })
      .def_property_readonly("was_captured",
                             [](const Group& group) { return group.info().was_captured != 0; })
      .def("routes_size", &Group::routes_size, "max_pairs"_a, "max_assignments"_a, "most_tokens"_a)
      .def("plan", &plan, py::kw_only(), "topk_idx"_a, "most_tokens"_a, "number"_a, "alignment"_a,
           "max_recv_rows"_a, "counts"_a, "token_routes"_a, "routes"_a, "max_pairs"_a,
           "max_assignments"_a, "kept"_a, "lacked"_a, "num_sms"_a, "stream"_a, "leaves_unused"_a)
      // None when the plan has failed on the device.
      .def(
          "wait_for_sizes",
          [](const Group& group, const PlanPointer& plan, const Tensor& rows_of_expert,
             std::uintptr_t stream) {
            return group.wait_for_sizes(*plan, &rows_of_expert, stream, raise_signals);
          },
          py::kw_only(), "plan"_a.none(false), "rows_of_expert"_a, "stream"_a, Unlocked())
      .def(
          "plan_receive",
          [](Group& group, const PlanPointer& plan, const Tensor& routes, std::int64_t max_pairs,
             std::int64_t max_assignments, int num_sms, std::uintptr_t stream) {
            group.plan_receive(*plan, &routes, max_pairs, max_assignments, num_sms, stream);
          },
          py::kw_only(), "plan"_a.none(false), "routes"_a, "max_pairs"_a, "max_assignments"_a,
          "num_sms"_a, "stream"_a)
      .def("dispatch", &move_rows<&Group::dispatch>, py::kw_only(), "plan"_a.none(false),
           "tokens"_a, "topk_w"_a, "rows"_a, "row_w"_a, "sums"_a, "num_sms"_a, "stream"_a)
      .def("combine", &move_rows<&Group::combine>, py::kw_only(), "plan"_a.none(false), "tokens"_a,
           "topk_w"_a, "rows"_a, "row_w"_a, "sums"_a, "num_sms"_a, "stream"_a)
      .def(
          "sums_size",
          [](const Group& group, const PlanPointer& plan, int num_sms, int row_bytes) {
            return group.sums_size(*plan, num_sms, row_bytes);
          },
          "plan"_a.none(false), "num_sms"_a, "row_bytes"_a)
      .def(
          "wait_until_idle", [](const Group& group) { group.wait_until_idle(raise_signals); },
          Unlocked())
      .def(
          "copy_waited_ns",
          [](const Group& group, const Tensor& out, std::uintptr_t stream) {
            group.copy_waited_ns(&out, stream);
          },
          "out"_a, "stream"_a)
      .def("bad_ranks", &ranks_of<&Group::bad_ranks>, "forget"_a)
      .def("bad_low_latency", &ranks_of<&Group::bad_low_latency>, "forget"_a)
      .def(
          "refuse",
          [](Group& group, const std::string& phase, std::uintptr_t stream) {
            group.refuse(native::phase_of(phase), stream);
          },
          "phase"_a, "stream"_a)
      .def("failure", [](const Group& group) -> std::optional<ncclepFailure_t> {
        const ncclepFailure_t failure = group.failure();
        if (failure.reason == ncclepReasonNone) return std::nullopt;
        return failure;
      });
}

ncclepLowLatencyConfig_t config_of(int max_tokens, int hidden, int top_k,
                                   const std::string& payload, const std::string& dtype,
                                   int num_scales) {
  return {sizeof(ncclepLowLatencyConfig_t),
          max_tokens,
          hidden,
          top_k,
          dtype_of(payload),
          dtype_of(dtype),
          num_scales};
}

void bind_low_latency(py::module_& module) {
  // Bytes of a rank's window, without a GPU.
  module.def(
      "low_latency_bytes",
      [](int num_ranks, int num_domains, int max_tokens, int hidden, int top_k,
         const std::string& payload, const std::string& dtype, int num_scales) {
        native::check_domains(num_ranks, num_domains);
        const auto config = config_of(max_tokens, hidden, top_k, payload, dtype, num_scales);
        return native::low_latency_window(num_ranks, num_domains, config).num_bytes();
      },
      py::kw_only(), "num_ranks"_a, "num_domains"_a, "max_tokens"_a, "hidden"_a, "top_k"_a,
      "payload"_a, "dtype"_a, "num_scales"_a);
  py::class_<LowLatency, std::shared_ptr<LowLatency>>(module, "LowLatencyHandle")
      .def(py::init([](const std::shared_ptr<Group>& group, int max_tokens, int hidden, int top_k,
                       const std::string& payload, const std::string& dtype, int num_scales,
                       const py::function& all_gather) {
             const auto config = config_of(max_tokens, hidden, top_k, payload, dtype, num_scales);
             const py::gil_scoped_release unlocked;
             return LowLatency::make(group, config, all_gather_of(all_gather, *group));
           }),
           "group"_a.none(false), py::kw_only(), "max_tokens"_a, "hidden"_a, "top_k"_a, "payload"_a,
           "dtype"_a, "num_scales"_a, "all_gather"_a)
      .def("close", &LowLatency::close, Unlocked())
      .def_property_readonly("rows", [](const LowLatency& of) { return number(of.buffers().rows); })
      .def_property_readonly("scales",
                             [](const LowLatency& of) { return number(of.buffers().scales); })
      .def_property_readonly("experts",
                             [](const LowLatency& of) { return number(of.buffers().experts); })
      .def_property_readonly("weights",
                             [](const LowLatency& of) { return number(of.buffers().weights); })
      .def(
          "dispatch",
          [](LowLatency& low_latency, const Tensor& x, const OptionalTensor& scales,
             const Tensor& topk_idx, const Tensor& weights, const Tensor& counts, bool completes,
             int num_ctas, std::uintptr_t stream) {
            low_latency.dispatch({sizeof(ncclepLowLatencyDispatch_t), &x, address(scales),
                                  &topk_idx, &weights, &counts, completes, num_ctas,
                                  address(stream)});
          },
          py::kw_only(), "x"_a, "scales"_a, "topk_idx"_a, "weights"_a, "counts"_a, "completes"_a,
          "num_ctas"_a, "stream"_a)
      .def(
          "complete_dispatch",
          [](LowLatency& low_latency, const Tensor& counts, std::uintptr_t stream) {
            low_latency.dispatch({sizeof(ncclepLowLatencyDispatch_t), nullptr, nullptr, nullptr,
                                  nullptr, &counts, true, 0, address(stream)});
          },
          py::kw_only(), "counts"_a, "stream"_a)
      .def(
          "combine",
          [](LowLatency& low_latency, const Tensor& y, const OptionalTensor& rows_of,
             const Tensor& out, bool sends, bool completes, int num_ctas, std::uintptr_t stream) {
            low_latency.combine({sizeof(ncclepLowLatencyCombine_t), &y, address(rows_of), &out,
                                 sends, completes, num_ctas, address(stream)});
          },
          py::kw_only(), "y"_a, "rows_of"_a, "out"_a, "sends"_a, "completes"_a, "num_ctas"_a,
          "stream"_a);
}

// How kernels divide their work, and the values that they compare, for logs and errors.
void bind_descriptions(py::module_& module) {
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
  // What the current device lacks for the kernels; empty if nothing.
  module.def("native_device_problem", [] { return native::device_problem(); });
  // Device memory of one rank in bytes, without a GPU: the windows, a plan's routes, and the rounds
  // of a dispatch.
  module.def(
      "native_memory",
      [](int num_ranks, int num_domains, int num_experts, int num_tokens, int top_k,
         std::size_t row_bytes, std::int64_t max_pairs, std::int64_t max_assignments) {
        native::check_group(num_ranks, num_experts, 1);
        native::check_domains(num_ranks, num_domains);
        const native::WindowSizes sizes =
            native::window_sizes({num_ranks, num_experts, 0, 0, num_domains},
                                 {sizeof(ncclepShape_t), num_tokens, top_k, row_bytes});
        const std::int64_t routes = native::routes_size(sizes.control, max_pairs, max_assignments,
                                                        sizes.control.max_tokens);
        py::dict memory;
        memory["control"] = sizes.control_bytes;
        memory["rows"] = sizes.rows_bytes;
        memory["routes"] = 4 * routes;
        memory["rounds"] = sizes.control.num_rounds;
        memory["token_routes"] = native::TokenRoutes::rows(sizes.control);  // int32 of a token
        return memory;
      },
      py::kw_only(), "num_ranks"_a, "num_domains"_a, "num_experts"_a, "num_tokens"_a, "top_k"_a,
      "row_bytes"_a, "max_pairs"_a, "max_assignments"_a);
  module.attr("CHUNK") = native::kChunk;
  module.attr("PHASES") = native::kPhases;
  module.attr("MAX_RANKS") = NCCLEP_MAX_RANKS;
  // Of one NVLink domain, as far as this build has kernels; and on GPUs older than sm_100, and in
  // low-latency mode.
  module.attr("MAX_LOCAL_RANKS") = native::kBuiltLocalRanks;
  module.attr("NARROW_LOCAL_RANKS") = native::kWarpSize;
  module.attr("MAX_DOMAINS") = NCCLEP_MAX_DOMAINS;
  module.attr("MAX_EXPERTS") = NCCLEP_MAX_EXPERTS;
  module.attr("MAX_LOCAL_EXPERTS") = NCCLEP_MAX_LOCAL_EXPERTS;
  module.attr("MAX_TOKENS") = NCCLEP_MAX_TOKENS;
  module.attr("MAX_TOP_K") = NCCLEP_MAX_TOP_K;
  module.attr("LOW_LATENCY_TOKENS") = NCCLEP_LOW_LATENCY_TOKENS;
}

}  // namespace

void bind_native(py::module_& module) {
  bind_results(module);
  bind_group(module);
  bind_low_latency(module);
  bind_descriptions(module);
}

}  // namespace ncclep::bindings
