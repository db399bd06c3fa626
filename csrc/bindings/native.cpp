// The native engine's groups, plans and steps, over the C interface.
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/c_calls.h"
#include "native/host/call.h"
#include "native/host/checks.h"
#include "native/rows/cta_roles.h"

using namespace py::literals;

namespace ncclep::bindings {
namespace {

class Plan {
 public:
  explicit Plan(ncclepPlan_t plan) : plan_(plan) {}
  ~Plan() { ncclepPlanDestroy(plan_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ncclepPlan_t get() const { return plan_; }

 private:
  ncclepPlan_t plan_;
};

// Held so that pybind11 refuses an object that was never initialised.
using PlanPointer = std::shared_ptr<Plan>;

ncclepShape_t shape_of(int num_tokens, int top_k, std::size_t row_bytes) {
  ncclepShape_t shape = NCCLEP_SHAPE_INIT;
  shape.num_tokens = num_tokens;
  shape.top_k = top_k;
  shape.row_bytes = row_bytes;
  return shape;
}

PlanPointer make_plan(const Group& group, const Passed& topk_idx, int most_tokens,
                      std::uint64_t number, int alignment, std::int64_t max_recv_rows,
                      const Passed& counts, const Passed& token_routes, const Passed& routes,
                      std::int64_t max_pairs, std::int64_t max_assignments, const Passed& kept,
                      const Passed& lacked, int num_sms, std::uintptr_t stream) {
  ncclepPlanConfig_t config = NCCLEP_PLAN_CONFIG_INIT;
  config.topk_idx = topk_idx;
  config.most_tokens = most_tokens;
  config.number = number;
  config.alignment = alignment;
  config.max_recv_rows = max_recv_rows;
  config.counts = counts;
  config.token_routes = token_routes;
  config.routes = routes;
  config.max_pairs = max_pairs;
  config.max_assignments = max_assignments;
  config.kept = kept;
  config.lacked = lacked;
  config.num_sms = num_sms;
  config.stream = pointer(stream);
  ncclepPlan_t plan = nullptr;
  check(ncclepPlanCreate(&plan, group.get(), &config));
  return std::make_shared<Plan>(plan);
}

// None when the plan has failed on the device.
std::optional<ncclepPlanSizes_t> wait_for_sizes(const Group& group, const PlanPointer& plan,
                                                const Passed& rows_of_expert,
                                                std::uintptr_t stream) {
  ncclepPlanSizes_t sizes = NCCLEP_PLAN_SIZES_INIT;
  const ncclepResult_t result =
      ncclepPlanWait(plan->get(), group.get(), rows_of_expert, pointer(stream), &sizes);
  if (result == ncclepRemoteError) return std::nullopt;
  check(result);
  return sizes;
}

using Step = ncclepResult_t (*)(ncclepGroup_t, ncclepPlan_t, const ncclepRows_t*);

void move_rows(Step step, const Group& group, const PlanPointer& plan, const Passed& tokens,
               const Passed& topk_w, const Passed& rows, const Passed& row_w, const Passed& sums,
               int num_sms, std::uintptr_t stream) {
  ncclepRows_t given = NCCLEP_ROWS_INIT;
  given.tokens = tokens;
  given.topk_w = topk_w;
  given.rows = rows;
  given.row_w = row_w;
  given.sums = sums;
  given.num_sms = num_sms;
  given.stream = pointer(stream);
  check(step(group.get(), plan->get(), &given));
}

std::optional<ncclepFailure_t> failure_of(const Group& group) {
  ncclepFailure_t failure = NCCLEP_FAILURE_INIT;
  if (group.get() == nullptr) return std::nullopt;
  check(ncclepGroupGetFailure(group.get(), &failure));
  if (failure.reason == ncclepReasonNone) return std::nullopt;
  return failure;
}

std::vector<int> bad_ranks_of(const Group& group, bool forget, bool low_latency) {
  std::vector<int> ranks;
  if (group.get() == nullptr) return ranks;
  std::uint32_t words[NCCLEP_MAX_RANKS / 32];
  check(ncclepGroupBadRoutings(group.get(), forget, low_latency ? nullptr : words,
                               low_latency ? words : nullptr));
  for (int rank = 0; rank < NCCLEP_MAX_RANKS; ++rank) {
    if (words[rank / 32] >> rank % 32 & 1) ranks.push_back(rank);
  }
  return ranks;
}

void bind_group(py::module_& module) {
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
  py::class_<Plan, PlanPointer>(module, "PlanHandle");
  py::class_<Group, std::shared_ptr<Group>>(module, "GroupHandle")
      .def(py::init<std::shared_ptr<Communicator>, int, double>(), "communicator"_a.none(false),
           "num_experts"_a, "timeout_s"_a)
      // What has grown, such as "tokens 0 -> 128"; None when the windows were large enough.
      .def(
          "reserve",
          [](Group& group, int num_tokens, int top_k, std::size_t row_bytes, std::uintptr_t stream,
             const py::function& all_gather) -> std::optional<std::string> {
            const ncclepShape_t shape = shape_of(num_tokens, top_k, row_bytes);
            const std::size_t num_bytes = group.info().num_bytes;
            group.with_all_gather(all_gather, [&] {
              return ncclepGroupReserve(group.get(), &shape, pointer(stream));
            });
            const ncclepGroupInfo_t info = group.info();
            if (info.num_bytes == num_bytes) return std::nullopt;
            return info.growth;
          },
          py::kw_only(), "num_tokens"_a, "top_k"_a, "row_bytes"_a, "stream"_a, "all_gather"_a)
      // Whether the windows are large enough; None when the group has failed.
      .def(
          "begin",
          [](const Group& group, double timeout_s, int num_tokens, int top_k,
             std::size_t row_bytes) -> std::optional<bool> {
            const ncclepShape_t shape = shape_of(num_tokens, top_k, row_bytes);
            int fits = 0;
            const ncclepResult_t result = ncclepGroupBegin(group.get(), timeout_s, &shape, &fits);
            if (result == ncclepRemoteError) return std::nullopt;
            check(result);
            return fits != 0;
          },
          "timeout_s"_a, "num_tokens"_a, "top_k"_a, "row_bytes"_a)
      .def("close", &Group::close)
      // Rows of a plan's token routes.
      .def_property_readonly("num_token_routes",
                             [](const Group& group) { return group.info().num_token_routes; })
      .def_property_readonly("num_bytes", [](const Group& group) { return group.info().num_bytes; })
      .def_property_readonly("max_tokens",
                             [](const Group& group) { return group.info().max_tokens; })
      .def_property_readonly("was_captured",
                             [](const Group& group) { return group.info().was_captured != 0; })
      .def(
          "routes_size",
          [](const Group& group, std::int64_t max_pairs, std::int64_t max_assignments,
             int most_tokens) {
            std::int64_t size = 0;
            check(ncclepRoutesSize(group.get(), max_pairs, max_assignments, most_tokens, &size));
            return size;
          },
          "max_pairs"_a, "max_assignments"_a, "most_tokens"_a)
      .def("plan", &make_plan, py::kw_only(), "topk_idx"_a, "most_tokens"_a, "number"_a,
           "alignment"_a, "max_recv_rows"_a, "counts"_a, "token_routes"_a, "routes"_a,
           "max_pairs"_a, "max_assignments"_a, "kept"_a, "lacked"_a, "num_sms"_a, "stream"_a)
      .def("wait_for_sizes", &wait_for_sizes, py::kw_only(), "plan"_a.none(false),
           "rows_of_expert"_a, "stream"_a, Unlocked())
      .def(
          "plan_receive",
          [](const Group& group, const PlanPointer& plan, const Passed& routes,
             std::int64_t max_pairs, std::int64_t max_assignments, int num_sms,
             std::uintptr_t stream) {
            check(ncclepPlanReceive(plan->get(), group.get(), routes, max_pairs, max_assignments,
                                    num_sms, pointer(stream)));
          },
          py::kw_only(), "plan"_a.none(false), "routes"_a, "max_pairs"_a, "max_assignments"_a,
          "num_sms"_a, "stream"_a)
      .def(
          "dispatch",
          [](const Group& group, const PlanPointer& plan, const Passed& x, const Passed& w,
             const Passed& rows, const Passed& row_w, int num_sms, std::uintptr_t stream) {
            move_rows(&ncclepDispatch, group, plan, x, w, rows, row_w, {}, num_sms, stream);
          },
          py::kw_only(), "plan"_a.none(false), "x"_a, "w"_a, "rows"_a, "row_w"_a, "num_sms"_a,
          "stream"_a)
      .def(
          "combine",
          [](const Group& group, const PlanPointer& plan, const Passed& y, const Passed& w,
             const Passed& sums, const Passed& out, const Passed& topk_w, int num_sms,
             std::uintptr_t stream) {
            move_rows(&ncclepCombine, group, plan, out, topk_w, y, w, sums, num_sms, stream);
          },
          py::kw_only(), "plan"_a.none(false), "y"_a, "w"_a, "sums"_a, "out"_a, "topk_w"_a,
          "num_sms"_a, "stream"_a)
      .def(
          "sums_size",
          [](const Group& group, const PlanPointer& plan, int num_sms, int row_bytes) {
            std::int64_t num_rows = 0;
            check(ncclepCombineScratch(group.get(), plan->get(), num_sms, row_bytes, &num_rows));
            return num_rows;
          },
          "plan"_a.none(false), "num_sms"_a, "row_bytes"_a)
      .def(
          "wait_until_idle",
          [](const Group& group) {
            if (group.get() != nullptr) check(ncclepGroupWait(group.get()));
          },
          Unlocked())
      .def(
          "copy_waited_ns",
          [](const Group& group, const Passed& out, std::uintptr_t stream) {
            check(ncclepGroupCopyWaitedNs(group.get(), out, pointer(stream)));
          },
          "out"_a, "stream"_a)
      .def(
          "bad_ranks",
          [](const Group& group, bool forget) { return bad_ranks_of(group, forget, false); },
          "forget"_a)
      .def(
          "bad_low_latency",
          [](const Group& group, bool forget) { return bad_ranks_of(group, forget, true); },
          "forget"_a)
      .def(
          "refuse",
          [](const Group& group, const std::string& phase, std::uintptr_t stream) {
            const auto number = static_cast<ncclepPhase_t>(native::phase_of(phase));
            check(ncclepGroupRefuse(group.get(), number, pointer(stream)));
          },
          "phase"_a, "stream"_a)
      .def("failure", &failure_of);
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
  module.def(
      "native_min_sms",
      [](int num_ranks) {
        int num_sms = 0;
        check(ncclepMinSms(num_ranks, &num_sms));
        return num_sms;
      },
      "num_ranks"_a);
  // What the current device lacks for the kernels; empty if nothing.
  module.def("native_device_problem", [] { return native::device_problem(); });
  // Device memory of one rank in bytes, without a GPU: the windows, a plan's routes, and the rounds
  // of a dispatch.
  module.def(
      "native_memory",
      [](int num_ranks, int num_domains, int num_experts, int num_tokens, int top_k,
         std::size_t row_bytes, std::int64_t max_pairs, std::int64_t max_assignments) {
        native::check_group(num_ranks, num_experts, 1);
        require(0 < num_domains && num_ranks % num_domains == 0, num_domains, " domains of ",
                num_ranks, " ranks: must be equally large");
        const native::WindowSizes sizes = native::window_sizes(
            {num_ranks, num_experts, 0, 0, num_domains}, num_tokens, top_k, row_bytes);
        const std::int64_t routes = native::routes_size(sizes.control, max_pairs, max_assignments,
                                                        sizes.control.max_chunks());
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
  bind_group(module);
  bind_descriptions(module);
}

}  // namespace ncclep::bindings
