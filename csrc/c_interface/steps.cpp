// Plans, dispatch and combine of the C interface.
#include "c_interface/handles.h"

using namespace ncclep::c_interface;
using ncclep::number_of;
using ncclep::read;
using ncclep::write;

ncclepResult_t ncclepRoutesSize(ncclepGroup_t group, int64_t max_pairs, int64_t max_assignments,
                                int most_tokens, int64_t* num_elements) {
  return guarded([&] {
    out(num_elements, "num_elements") =
        group_at(group).routes_size(max_pairs, max_assignments, most_tokens);
  });
}

ncclepResult_t ncclepPlanCreate(ncclepPlan_t* plan, ncclepGroup_t group,
                                const ncclepPlanConfig_t* config) {
  return guarded([&] {
    out(plan, "plan") = nullptr;
    *plan = new ncclepPlan{group_at(group).plan(read(config, "ncclepPlanConfig_t"))};
  });
}

ncclepResult_t ncclepPlanWait(ncclepPlan_t plan, ncclepGroup_t group,
                              const ncclepTensor_t* rows_of_expert, void* stream,
                              ncclepPlanSizes_t* sizes) {
  return guarded([&] {
    read(sizes, "ncclepPlanSizes_t");
    const auto found =
        group_at(group).wait_for_sizes(at(plan, "plan").plan, rows_of_expert, number_of(stream),
                                       poll_of(group->config.poll, group->config.user));
    if (!found) {
      throw ncclep::PeerError("the plan has failed on the device: ncclepGroupGetFailure says why");
    }
    write(*found, sizes, "ncclepPlanSizes_t");
  });
}

ncclepResult_t ncclepPlanReceive(ncclepPlan_t plan, ncclepGroup_t group,
                                 const ncclepTensor_t* routes, int64_t max_pairs,
                                 int64_t max_assignments, int num_sms, void* stream) {
  return guarded([&] {
    group_at(group).plan_receive(at(plan, "plan").plan, routes, max_pairs, max_assignments, num_sms,
                                 number_of(stream));
  });
}

ncclepResult_t ncclepPlanDestroy(ncclepPlan_t plan) {
  return guarded([&] { delete &at(plan, "plan"); });
}

ncclepResult_t ncclepDispatch(ncclepGroup_t group, ncclepPlan_t plan, const ncclepRows_t* rows) {
  return guarded(
      [&] { group_at(group).dispatch(at(plan, "plan").plan, read(rows, "ncclepRows_t")); });
}

ncclepResult_t ncclepCombine(ncclepGroup_t group, ncclepPlan_t plan, const ncclepRows_t* rows) {
  return guarded(
      [&] { group_at(group).combine(at(plan, "plan").plan, read(rows, "ncclepRows_t")); });
}

ncclepResult_t ncclepCombineScratch(ncclepGroup_t group, ncclepPlan_t plan, int num_sms,
                                    int row_bytes, int64_t* num_rows) {
  return guarded([&] {
    out(num_rows, "num_rows") =
        group_at(group).sums_size(at(plan, "plan").plan, num_sms, row_bytes);
  });
}
