// The group's members that queue the steps: plan, dispatch, combine.
#include <cuda_runtime.h>

#include <algorithm>
#include <optional>

#include "common/cuda.h"
#include "native/host/call.h"
#include "native/host/checks.h"
#include "native/host/group.h"
#include "native/plan/overflow.h"
#include "native/plan/plan.h"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"

namespace ncclep::native {

namespace {

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

template <typename T>
T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data) : nullptr;
}

int row_bytes_of(const Tensor& rows) {
  return static_cast<int>(rows.shape.at(1)) * itemsize_of(rows.dtype);
}

TokenRoutes token_routes_of(const Tensor& token_routes, const Control& control) {
  return TokenRoutes::in(pointer<std::int32_t>(token_routes), control, token_routes.shape.at(1));
}

}  // namespace

std::int64_t rail_routes_size(const Control& control, int num_chunks) {
  if (control.num_domains == 1) return 0;
  return RailRoutes::size(control, num_chunks * kChunk, num_chunks);
}

std::int64_t routes_size(const Control& control, std::int64_t max_pairs,
                         std::int64_t max_assignments, int num_chunks) {
  check_room(control, max_pairs, max_assignments, num_chunks);
  return rail_routes_size(control, num_chunks) +
         ReceivedRoutes::size(control.num_ranks, num_chunks, max_pairs, max_assignments);
}

RailRoutes Group::rail_routes(const Plan& plan) const {
  if (control_.num_domains == 1) return {};
  return RailRoutes::in(pointer<std::int32_t>(plan.routes), control_, plan.num_chunks * kChunk,
                        plan.num_chunks);
}

ReceivedRoutes Group::received_routes(const Plan& plan) const {
  return ReceivedRoutes::in(
      pointer<std::int32_t>(plan.routes) + rail_routes_size(control_, plan.num_chunks),
      control_.num_ranks, plan.num_chunks, plan.max_pairs, plan.max_assignments);
}

std::int64_t Group::routes_size(std::int64_t max_pairs, std::int64_t max_assignments,
                                int num_chunks) const {
  return native::routes_size(control_, max_pairs, max_assignments, num_chunks);
}

PlanScratch Group::plan_scratch(int num_sms) const {
  check_num_sms(control_, num_sms, max_sms_);
  return {plan_scratch_, control_, max_sms_};
}

std::uint32_t Group::plan(Plan& plan, const Tensor& topk_idx, int alignment,
                          std::int64_t max_recv_rows, const std::optional<Tensor>& kept,
                          const std::optional<Tensor>& lacked, std::int64_t max_pairs,
                          std::int64_t max_assignments, const Tensor& routes, int num_sms,
                          std::uintptr_t stream) {
  check_plan(control_, plan);
  check_topk(plan, topk_idx, alignment);
  require(max_recv_rows > 0 || (max_recv_rows == 0 && !kept), "a plan of ", max_recv_rows,
          " rows: assignments are dropped only in static mode, where it is positive");
  require(kept || !lacked, "a plan that drops nothing: `lacked` needs `kept`");
  if (kept) check_drop(control_, plan, max_recv_rows, *kept, lacked);
  const bool is_static = max_recv_rows > 0;
  take_routes(plan, max_pairs, max_assignments, routes);
  const PlanScratch scratch = plan_scratch(num_sms);
  PlanCount count{};
  count.topk_idx = topk_idx.data;
  count.is_int64 = topk_idx.dtype == DType::kInt64;
  count.num_tokens = static_cast<int>(topk_idx.shape.at(0));
  count.top_k = plan.top_k;
  count.most_chunks = plan.num_chunks;
  count.alignment = alignment;
  count.is_static = is_static;
  count.has_dropped = kept.has_value();
  count.tokens_per_expert = pointer<std::int64_t>(plan.counts);
  count.routed_per_expert = count.tokens_per_expert + control_.num_local();
  count.num_dropped = count.routed_per_expert + control_.num_local();
  count.token_routes = token_routes_of(plan.token_routes, control_);
  count.rail_routes = rail_routes(plan);
  Drop drop{};
  if (kept) {
    drop.topk_idx = count.topk_idx;
    drop.is_int64 = count.is_int64;
    drop.num_tokens = count.num_tokens;
    drop.top_k = plan.top_k;
    drop.alignment = alignment;
    drop.max_recv_rows = max_recv_rows;
    drop.kept = pointer<std::int32_t>(kept);
    drop.num_wanted = count.num_dropped;
    if (lacked) drop.lacked = pointer<std::int64_t>(*lacked);
    count.topk_idx = drop.kept;
    count.is_int64 = false;
  }
  if (is_static) {
    plan.num_rows = max_recv_rows;
  } else {
    if (++ticket_ == 0) ++ticket_;
    count.ticket = ticket_;
  }
  with_context(0, [&](const auto& me) {
    auto first = me;  // in static mode this kernel compares the ranks' calls
    if (is_static) first.call = call_of_plan(plan.top_k, alignment, max_recv_rows);
    queue(stream, [&] {
      if (count.ticket != 0) reached_->record(stream);
      if (kept) drop_what_does_not_fit(first, drop, scratch, num_sms, stream, rails_.get());
      native::plan_count(kept ? me : first, count, scratch, num_sms, stream, rails_.get());
      native::plan_receive(me, received_routes(plan), scratch, num_sms, stream, rail_routes(plan));
    });
  });
  return count.ticket;
}

void Group::take_routes(Plan& plan, std::int64_t max_pairs, std::int64_t max_assignments,
                        const Tensor& routes) const {
  check_routes(routes, routes_size(max_pairs, max_assignments, plan.num_chunks));
  plan.max_pairs = plan.num_pairs = max_pairs;
  plan.max_assignments = plan.num_assignments = max_assignments;
  plan.routes = routes;
}

void Group::plan_receive(Plan& plan, std::int64_t max_pairs, std::int64_t max_assignments,
                         const Tensor& routes, int num_sms, std::uintptr_t stream) {
  check_plan(control_, plan);
  const Tensor before = plan.routes;
  take_routes(plan, max_pairs, max_assignments, routes);
  const std::size_t kept = rail_routes_size(control_, plan.num_chunks) * sizeof(std::int32_t);
  queue(stream, [&] {
    if (kept > 0) {  // what the first kernel has written
      cuda_check(cudaMemcpyAsync(plan.routes.data, before.data, kept, cudaMemcpyDeviceToDevice,
                                 reinterpret_cast<cudaStream_t>(stream)),
                 "cudaMemcpyAsync");
    }
    with_context(0, [&](const auto& me) {
      native::plan_receive(me, received_routes(plan), plan_scratch(num_sms), num_sms, stream,
                           rail_routes(plan));
    });
  });
}

void Group::dispatch(const Plan& plan, const Tensor& x, const std::optional<Tensor>& w,
                     const Tensor& rows, const std::optional<Tensor>& row_w, int num_sms,
                     std::uintptr_t stream) {
  check_received(control_, plan);
  check_rows(Phase::kDispatch, plan, row_bytes_, x, w, rows, row_w);
  check_num_sms(control_, num_sms, max_sms_);
  const int num_local = control_.num_experts / control_.num_ranks;
  Dispatch job{};
  job.x = pointer<const char>(x);
  job.w = pointer<const float>(w);
  job.rows = pointer<char>(rows);
  job.row_w = pointer<float>(row_w);
  job.has_weights = w.has_value();
  job.num_tokens = static_cast<int>(x.shape.at(0));
  job.most_tokens = plan.num_chunks * kChunk;
  job.top_k = plan.top_k;
  job.row_bytes = row_bytes_of(x);
  job.num_phases = num_phases_of(std::min(job.most_tokens, control_.round_tokens()), job.row_bytes);
  job.num_rows = rows.shape.at(0);
  job.tokens_per_expert = pointer<std::int64_t>(plan.counts);
  job.routed_per_expert = job.tokens_per_expert + num_local;
  job.token_ranks = token_routes_of(plan.token_routes, control_).token_ranks;
  job.routes = received_routes(plan);
  job.rail_routes = rail_routes(plan);
  const std::uint64_t call =
      call_of_rows(Phase::kDispatch, plan.number, x.dtype, job.row_bytes, job.has_weights);
  with_context(call, [&](const auto& me) {
    queue(stream, [&] { native::dispatch(me, job, num_sms, stream, rails_.get()); });
  });
}

std::int64_t Group::sums_size(const Plan& plan, int num_sms, int row_bytes) const {
  check_plan(control_, plan);
  check_num_sms(control_, num_sms, max_sms_);
  const CombineSplit split =
      split_combine(num_sms, control_.num_ranks, plan.top_k, row_bytes, control_.num_domains);
  return split.sending > 0 ? plan.num_pairs : 0;
}

void Group::combine(const Plan& plan, const Tensor& y, const std::optional<Tensor>& w,
                    const std::optional<Tensor>& sums, const Tensor& out,
                    const std::optional<Tensor>& topk_w, int num_sms, std::uintptr_t stream) {
  check_received(control_, plan);
  check_rows(Phase::kCombine, plan, row_bytes_, out, topk_w, y, w);
  check_sums(sums, sums_size(plan, num_sms, row_bytes_of(y)), y);
  Combine job{};
  job.y = pointer<const char>(y);
  job.sums = pointer<char>(sums);
  job.w = pointer<const float>(w);
  job.out = pointer<char>(out);
  job.topk_w = pointer<float>(topk_w);
  job.has_weights = w.has_value();
  job.dtype = y.dtype;
  job.num_tokens = static_cast<int>(out.shape.at(0));
  job.top_k = plan.top_k;
  job.row_bytes = row_bytes_of(y);
  job.token_routes = token_routes_of(plan.token_routes, control_);
  job.routes = received_routes(plan);
  if (control_.num_domains > 1) {
    job.most_tokens = plan.num_chunks * kChunk;
    job.num_phases =
        num_phases_of(std::min(job.most_tokens, control_.round_tokens()), job.row_bytes);
    job.rail_routes = rail_routes(plan);
  }
  const std::uint64_t call =
      call_of_rows(Phase::kCombine, plan.number, y.dtype, job.row_bytes, job.has_weights);
  with_context(call, [&](const auto& me) {
    queue(stream, [&] { native::combine(me, job, num_sms, stream, rails_.get()); });
  });
}

}  // namespace ncclep::native
