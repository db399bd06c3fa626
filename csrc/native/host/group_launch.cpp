// The group's members that queue the steps: plan, dispatch, combine.
#include <cuda_runtime.h>

#include <algorithm>
#include <optional>

#include "common/cuda.h"
#include "native/host/call_signature.h"
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
  return static_cast<int>(rows.shape[1]) * itemsize_of(rows.dtype);
}

TokenRoutes token_routes_of(const Tensor& token_routes, const Control& control) {
  return TokenRoutes::in(pointer<std::int32_t>(token_routes), control, token_routes.shape[1]);
}

// The part of a plan's routes for other domains, at the start, in int32.
std::int64_t rail_routes_size(const Control& control, int num_chunks) {
  if (control.num_domains == 1) return 0;
  return RailRoutes::size(control, num_chunks * kChunk, num_chunks);
}

}  // namespace

std::int64_t routes_size(const Control& control, std::int64_t max_pairs,
                         std::int64_t max_assignments, int most_tokens) {
  check_room(control, max_pairs, max_assignments, most_tokens);
  const int num_chunks = num_chunks_of(most_tokens);
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

PlanScratch Group::plan_scratch(int num_sms) const {
  check_num_sms(control_, num_sms, max_sms_);
  return {plan_scratch_, control_, max_sms_};
}

Plan Group::plan(const ncclepPlanConfig_t& config) {
  const Tensor topk_idx = tensor_at(config.topk_idx, "topk_idx");
  const auto kept = optional_tensor(config.kept, "kept");
  const auto lacked = optional_tensor(config.lacked, "lacked");
  require(topk_idx.ndim == 2 && topk_idx.shape[1] <= kMaxTopK,
          "topk_idx must be [T, K] with K at most ", kMaxTopK);
  require(config.most_tokens >= 0, config.most_tokens, " tokens: at least 0");
  Plan plan{tensor_at(config.counts, "counts"), tensor_at(config.token_routes, "token_routes"),
            num_chunks_of(config.most_tokens), static_cast<int>(topk_idx.shape[1]), config.number};
  check_plan(control_, plan);
  check_topk(plan, topk_idx, config.alignment);
  const std::int64_t max_recv_rows = config.max_recv_rows;
  require(max_recv_rows > 0 || (max_recv_rows == 0 && !kept), "a plan of ", max_recv_rows,
          " rows: assignments are dropped only in static mode, where it is positive");
  require(kept || !lacked, "a plan that drops nothing: `lacked` needs `kept`");
  if (kept) check_drop(control_, plan, max_recv_rows, *kept, lacked);
  const bool is_static = max_recv_rows > 0;
  take_routes(plan, config.routes, config.max_pairs, config.max_assignments);
  const int num_sms = config.num_sms, alignment = config.alignment;
  const std::uintptr_t stream = number_of(config.stream);
  const PlanScratch scratch = plan_scratch(num_sms);
  PlanCount count{};
  count.topk_idx = topk_idx.data;
  count.is_int64 = topk_idx.dtype == ncclepInt64;
  count.num_tokens = static_cast<int>(topk_idx.shape[0]);
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
    drop.num_requested = count.num_dropped;
    if (lacked) drop.lacked = pointer<std::int64_t>(*lacked);
    count.topk_idx = drop.kept;
    count.is_int64 = false;
  }
  plan.leaves_unused = !is_static || config.leaves_unused != 0;
  if (is_static) {
    plan.num_rows = max_recv_rows;
  } else {
    if (++ticket_ == 0) ++ticket_;
    count.ticket = plan.ticket = ticket_;
  }
  auto turn = take_turn(stream);
  with_context(0, [&](const auto& ctx) {
    auto first = ctx;  // in static mode this kernel compares the ranks' calls
    if (is_static) first.call = call_of_plan(plan.top_k, alignment, max_recv_rows);
    if (count.ticket != 0) reached_->record(stream);
    if (kept) drop_what_does_not_fit(first, drop, scratch, num_sms, stream, rails_.get());
    plan_count(kept ? ctx : first, count, scratch, num_sms, stream, rails_.get());
    native::plan_receive(ctx, received_routes(plan), scratch, num_sms, stream, rail_routes(plan));
  });
  turn.end();
  return plan;
}

void Group::take_routes(Plan& plan, const ncclepTensor_t* routes, std::int64_t max_pairs,
                        std::int64_t max_assignments) const {
  const Tensor given = tensor_at(routes, "routes");
  check_routes(given, routes_size(max_pairs, max_assignments, plan.num_chunks * kChunk));
  plan.max_pairs = plan.num_pairs = max_pairs;
  plan.max_assignments = plan.num_assignments = max_assignments;
  plan.routes = given;
}

void Group::plan_receive(Plan& plan, const ncclepTensor_t* routes, std::int64_t max_pairs,
                         std::int64_t max_assignments, int num_sms, std::uintptr_t stream) {
  check_plan(control_, plan);
  check_num_sms(control_, num_sms, max_sms_);
  Plan received = plan;  // a call that fails leaves the plan as it was
  take_routes(received, routes, max_pairs, max_assignments);
  const std::size_t kept = rail_routes_size(control_, plan.num_chunks) * sizeof(std::int32_t);
  auto turn = take_turn(stream);
  if (kept > 0) {  // what the first kernel has written
    cuda_check(cudaMemcpyAsync(received.routes.data, plan.routes.data, kept,
                               cudaMemcpyDeviceToDevice, reinterpret_cast<cudaStream_t>(stream)),
               "cudaMemcpyAsync");
  }
  with_context(0, [&](const auto& ctx) {
    native::plan_receive(ctx, received_routes(received), plan_scratch(num_sms), num_sms, stream,
                         rail_routes(received));
  });
  turn.end();
  plan = received;
}

Group::Rows Group::rows_at(Phase phase, const Plan& plan, const ncclepRows_t& given) const {
  Rows at{tensor_at(given.tokens, "tokens"), tensor_at(given.rows, "rows"),
          optional_tensor(given.topk_w, "topk_w"), optional_tensor(given.row_w, "row_w"),
          number_of(given.stream)};
  check_received(control_, plan);
  check_rows(phase, plan, row_bytes_, at.tokens, at.topk_w, at.rows, at.row_w);
  check_num_sms(control_, given.num_sms, max_sms_);
  return at;
}

void Group::dispatch(const Plan& plan, const ncclepRows_t& given) {
  const Rows at = rows_at(Phase::kDispatch, plan, given);
  Dispatch job{};
  job.x = pointer<const char>(at.tokens);
  job.w = pointer<const float>(at.topk_w);
  job.rows = pointer<char>(at.rows);
  job.row_w = pointer<float>(at.row_w);
  job.has_weights = at.row_w.has_value();
  job.num_tokens = static_cast<int>(at.tokens.shape[0]);
  job.most_tokens = plan.num_chunks * kChunk;
  job.top_k = plan.top_k;
  job.row_bytes = row_bytes_of(at.rows);
  job.num_phases = num_phases_of(std::min(job.most_tokens, control_.round_tokens()), job.row_bytes);
  job.num_rows = at.rows.shape[0];
  job.leaves_unused = plan.leaves_unused;
  job.tokens_per_expert = pointer<std::int64_t>(plan.counts);
  job.routed_per_expert = job.tokens_per_expert + control_.num_local();
  job.token_ranks = token_routes_of(plan.token_routes, control_).token_ranks;
  job.routes = received_routes(plan);
  job.rail_routes = rail_routes(plan);
  const std::uint64_t call =
      call_of_rows(Phase::kDispatch, plan.number, at.rows.dtype, job.row_bytes, job.has_weights);
  with_context(call, [&](const auto& ctx) {
    auto turn = take_turn(at.stream);
    native::dispatch(ctx, job, given.num_sms, at.stream, rails_.get());
    turn.end();
  });
}

std::int64_t Group::sums_size(const Plan& plan, int num_sms, int row_bytes) const {
  check_num_sms(control_, num_sms, max_sms_);
  const CombineSplit split =
      split_combine(num_sms, control_.num_ranks, plan.top_k, row_bytes, control_.num_domains);
  return split.sending > 0 ? plan.num_pairs : 0;
}

void Group::combine(const Plan& plan, const ncclepRows_t& given) {
  const Rows at = rows_at(Phase::kCombine, plan, given);
  Combine job{};
  job.row_bytes = row_bytes_of(at.rows);
  const auto sums = optional_tensor(given.sums, "sums");
  check_sums(sums, sums_size(plan, given.num_sms, job.row_bytes), at.rows);
  job.y = pointer<const char>(at.rows);
  job.sums = pointer<char>(sums);
  job.w = pointer<const float>(at.row_w);
  job.out = pointer<char>(at.tokens);
  job.topk_w = pointer<float>(at.topk_w);
  job.has_weights = at.row_w.has_value();
  job.dtype = at.rows.dtype;
  job.num_tokens = static_cast<int>(at.tokens.shape[0]);
  job.top_k = plan.top_k;
  job.token_routes = token_routes_of(plan.token_routes, control_);
  job.routes = received_routes(plan);
  if (control_.num_domains > 1) {
    job.most_tokens = plan.num_chunks * kChunk;
    job.num_phases =
        num_phases_of(std::min(job.most_tokens, control_.round_tokens()), job.row_bytes);
    job.rail_routes = rail_routes(plan);
  }
  const std::uint64_t call =
      call_of_rows(Phase::kCombine, plan.number, job.dtype, job.row_bytes, job.has_weights);
  with_context(call, [&](const auto& ctx) {
    auto turn = take_turn(at.stream);
    native::combine(ctx, job, given.num_sms, at.stream, rails_.get());
    turn.end();
  });
}

}  // namespace ncclep::native
