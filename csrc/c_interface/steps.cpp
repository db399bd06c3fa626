// Plans, dispatch and combine of the C interface.
#include "c_interface/handles.h"

namespace native = ncclep::native;
using namespace ncclep::c_interface;
using ncclep::require;
using ncclep::Tensor;

namespace {

native::Group& group_at(ncclepGroup_t group) { return *at(group, "native group").group; }

int num_chunks_of(int most_tokens) {
  require(most_tokens >= 0, most_tokens, " tokens: at least 0");
  return native::num_chunks_of(most_tokens);
}

}  // namespace

ncclepResult_t ncclepRoutesSize(ncclepGroup_t group, int64_t max_pairs, int64_t max_assignments,
                                int most_tokens, int64_t* num_elements) {
  return guarded([&] {
    out(num_elements, "num_elements") =
        group_at(group).routes_size(max_pairs, max_assignments, num_chunks_of(most_tokens));
  });
}

ncclepResult_t ncclepPlanCreate(ncclepPlan_t* plan, ncclepGroup_t group,
                                const ncclepPlanConfig_t* config) {
  return guarded([&] {
    out(plan, "plan") = nullptr;
    const ncclepPlanConfig_t given = read(config, "ncclepPlanConfig_t");
    const Tensor topk_idx = tensor_at(given.topk_idx, "topk_idx");
    require(topk_idx.shape.size() == 2 && topk_idx.shape[1] <= native::kMaxTopK,
            "topk_idx must be [T, K] with K at most ", native::kMaxTopK);
    auto made = std::make_unique<ncclepPlan>();
    made->plan = {tensor_at(given.counts, "counts"), tensor_at(given.token_routes, "token_routes"),
                  num_chunks_of(given.most_tokens), static_cast<int>(topk_idx.shape[1]),
                  given.number};
    made->ticket = group_at(group).plan(made->plan, topk_idx, given.alignment, given.max_recv_rows,
                                        optional_tensor(given.kept, "kept"),
                                        optional_tensor(given.lacked, "lacked"), given.max_pairs,
                                        given.max_assignments, tensor_at(given.routes, "routes"),
                                        given.num_sms, stream_of(given.stream));
    *plan = made.release();
  });
}

ncclepResult_t ncclepPlanWait(ncclepPlan_t plan, ncclepGroup_t group,
                              const ncclepTensor_t* rows_of_expert, void* stream,
                              ncclepPlanSizes_t* sizes) {
  return guarded([&] {
    read(sizes, "ncclepPlanSizes_t");
    native::Plan& waited = at(plan, "plan").plan;
    const auto found = group_at(group).wait_for_sizes(
        waited, plan->ticket, tensor_at(rows_of_expert, "rows_of_expert"), stream_of(stream),
        poll_of(group->config.poll, group->config.user));
    if (!found) {
      throw ncclep::PeerError("the plan has failed on the device: ncclepGroupGetFailure says why");
    }
    ncclepPlanSizes_t made = NCCLEP_PLAN_SIZES_INIT;
    made.num_rows = found->num_rows;
    made.num_pairs = found->num_pairs;
    made.num_assignments = found->num_assignments;
    made.first_bad_rank = found->first_bad_rank;
    made.has_room =
        found->num_pairs <= waited.max_pairs && found->num_assignments <= waited.max_assignments;
    *sizes = made;
  });
}

ncclepResult_t ncclepPlanReceive(ncclepPlan_t plan, ncclepGroup_t group,
                                 const ncclepTensor_t* routes, int64_t max_pairs,
                                 int64_t max_assignments, int num_sms, void* stream) {
  return guarded([&] {
    group_at(group).plan_receive(at(plan, "plan").plan, max_pairs, max_assignments,
                                 tensor_at(routes, "routes"), num_sms, stream_of(stream));
  });
}

ncclepResult_t ncclepPlanDestroy(ncclepPlan_t plan) {
  return guarded([&] { delete &at(plan, "plan"); });
}

ncclepResult_t ncclepDispatch(ncclepGroup_t group, ncclepPlan_t plan, const ncclepRows_t* rows) {
  return guarded([&] {
    const ncclepRows_t given = read(rows, "ncclepRows_t");
    group_at(group).dispatch(at(plan, "plan").plan, tensor_at(given.tokens, "tokens"),
                             optional_tensor(given.topk_w, "topk_w"), tensor_at(given.rows, "rows"),
                             optional_tensor(given.row_w, "row_w"), given.num_sms,
                             stream_of(given.stream));
  });
}

ncclepResult_t ncclepCombine(ncclepGroup_t group, ncclepPlan_t plan, const ncclepRows_t* rows) {
  return guarded([&] {
    const ncclepRows_t given = read(rows, "ncclepRows_t");
    group_at(group).combine(
        at(plan, "plan").plan, tensor_at(given.rows, "rows"), optional_tensor(given.row_w, "row_w"),
        optional_tensor(given.sums, "sums"), tensor_at(given.tokens, "tokens"),
        optional_tensor(given.topk_w, "topk_w"), given.num_sms, stream_of(given.stream));
  });
}

ncclepResult_t ncclepCombineScratch(ncclepGroup_t group, ncclepPlan_t plan, int num_sms,
                                    int row_bytes, int64_t* num_rows) {
  return guarded([&] {
    out(num_rows, "num_rows") =
        group_at(group).sums_size(at(plan, "plan").plan, num_sms, row_bytes);
  });
}
