#include "native/host/checks.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "common/cuda.h"
#include "native/plan/plan.h"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"

namespace ncclep::native {

namespace {

constexpr double kMaxTimeout = 1e9;
constexpr int kMaxAlignment = 256;
// Bytes that the kernels copy at a time.
constexpr int kVector = 16;

// Formats a tensor's shape, [3, 8], but only when converted to a string.
struct Shape {
  const Tensor& tensor;

  operator std::string() const {
    std::string text = "[";
    for (const std::int64_t size : tensor) {
      text += join_text(text.size() == 1 ? "" : ", ", size);
    }
    return text + "]";
  }
};

struct Need {
  const char* kernel;
  std::size_t shared_bytes;
};

// Of the kernels for domains of so many groups of ranks.
template <int kGroups>
std::vector<Need> needs() {
  return {{"plan", plan_shared_bytes<kGroups>()},
          {"dispatch", dispatch_shared_bytes<kGroups>()},
          {"combine", combine_shared_bytes<kGroups>()}};
}
std::vector<Need> needs_of([[maybe_unused]] int rank_groups) {
  if constexpr (kBuiltLocalRanks > kWarpSize) {
    if (rank_groups > 1) return needs<kMaxRankGroups>();
  }
  return needs<1>();
}

Shape shape_of(const Tensor& tensor) { return {tensor}; }

std::int64_t num_tokens_of(const Plan& plan) { return plan.token_routes.shape[1]; }

}  // namespace

std::string device_problem(int rank_groups) {
  int device = 0, offered = 0;
  try {
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaDeviceGetAttribute(&offered, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    for (const Need& need : needs_of(rank_groups)) {
      if (need.shared_bytes <= static_cast<std::size_t>(offered)) continue;
      return join_text("the kernel of ", need.kernel, " needs up to ", need.shared_bytes,
                       " bytes of shared memory in a CTA, and the GPU offers ", offered,
                       ": use a GPU of a data center, such as sm_90 or sm_100, or the engine "
                       "'reference'");
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void check_timeout(double seconds) {
  require(seconds > 0 && seconds <= kMaxTimeout, "a deadline of ", seconds,
          " s: it must be positive, and at most ", kMaxTimeout);
}

void check_group(int num_ranks, int num_experts, double timeout_s) {
  require(0 < num_ranks && num_ranks <= kMaxRanks, num_ranks, " ranks: from 1 to ", kMaxRanks);
  require(0 < num_experts && num_experts <= kMaxExperts && num_experts % num_ranks == 0,
          num_experts, " experts: from 1 to ", kMaxExperts, ", and a multiple of the ", num_ranks,
          " ranks");
  require(num_experts / num_ranks <= kMaxLocalExperts, num_experts / num_ranks,
          " experts on a rank: at most ", kMaxLocalExperts);
  check_timeout(timeout_s);
}

void check_domains(int num_ranks, int num_domains) {
  require(0 < num_domains && 0 < num_ranks && num_ranks % num_domains == 0, num_domains,
          " domains of ", num_ranks, " ranks: must be equally large");
}

void check_shape(const ncclepShape_t& shape) {
  require(0 <= shape.num_tokens && shape.num_tokens <= kMaxTokens, shape.num_tokens,
          " tokens: at most ", kMaxTokens);
  require(0 < shape.top_k && shape.top_k <= kMaxTopK, "top-k ", shape.top_k, ": from 1 to ",
          kMaxTopK);
  require(0 < shape.row_bytes && shape.row_bytes <= kMaxRowBytes && shape.row_bytes % kVector == 0,
          "rows of ", shape.row_bytes, " bytes: a multiple of ", kVector, ", at most ",
          kMaxRowBytes);
}

void check_room(const Control& control, std::int64_t max_pairs, std::int64_t max_assignments,
                int most_tokens) {
  const std::int64_t most_pairs = static_cast<std::int64_t>(control.num_ranks) * kMaxTokens;
  require(0 <= max_pairs && max_pairs <= most_pairs, "room for ", max_pairs, " pairs: at most ",
          most_pairs);
  require(0 <= max_assignments && max_assignments <= most_pairs * kMaxTopK, "room for ",
          max_assignments, " assignments: at most ", most_pairs * kMaxTopK);
  require(0 <= most_tokens && most_tokens <= kMaxTokens, most_tokens, " tokens: from 0 to ",
          kMaxTokens);
}

void check_num_sms(const Control& control, int num_sms, int max_sms) {
  const int least = min_ctas(control.num_ranks);
  require(least <= num_sms && num_sms <= max_sms, num_sms, " SMs for the native engine: with ",
          control.num_ranks, " ranks it needs at least ", least, ", and the GPU has ", max_sms);
}

void check_plan(const Control& control, const Plan& plan) {
  require(plan.counts.is(ncclepInt64, {2 * control.num_local() + 1}),
          "a plan's counts must be int64 [", 2 * control.num_local() + 1, "], not ",
          shape_of(plan.counts));
  require(plan.token_routes.dtype == ncclepInt32 && plan.token_routes.ndim == 2 &&
              plan.token_routes.shape[0] == TokenRoutes::rows(control),
          "a plan's token routes must be int32 [", TokenRoutes::rows(control), ", T], not ",
          shape_of(plan.token_routes));
  require(0 < plan.top_k && plan.top_k <= control.max_top_k, "a plan of top-k ", plan.top_k,
          ": the windows are for ", control.max_top_k, " at most");
  require(0 <= plan.num_chunks && plan.num_chunks <= control.max_chunks() &&
              num_tokens_of(plan) <= static_cast<std::int64_t>(plan.num_chunks) * kChunk,
          "a plan of ", num_tokens_of(plan), " tokens and ", plan.num_chunks, " chunks of ", kChunk,
          ": the windows are for ", control.max_tokens, " tokens");
}

void check_received(const Control& control, const Plan& plan) {
  check_plan(control, plan);
  require(plan.routes.data != nullptr && plan.num_rows >= 0 && plan.num_pairs <= plan.max_pairs &&
              plan.num_assignments <= plan.max_assignments,
          "a plan whose routes were not received: there is room for ", plan.max_pairs,
          " pairs and ", plan.max_assignments, " assignments, and it has ", plan.num_pairs, " and ",
          plan.num_assignments);
}

void check_topk(const Plan& plan, const Tensor& topk_idx, int alignment) {
  require((topk_idx.dtype == ncclepInt32 || topk_idx.dtype == ncclepInt64) &&
              topk_idx.has_shape({num_tokens_of(plan), plan.top_k}),
          "topk_idx must be int32 or int64 [", num_tokens_of(plan), ", ", plan.top_k,
          "] for this plan, not ", shape_of(topk_idx));
  require(0 < alignment && alignment <= kMaxAlignment, "alignment ", alignment, ": from 1 to ",
          kMaxAlignment);
}

void check_drop(const Control& control, const Plan& plan, std::int64_t max_recv_rows,
                const Tensor& kept, const std::optional<Tensor>& lacked) {
  require(0 < max_recv_rows && max_recv_rows <= INT32_MAX, "max_recv_rows ", max_recv_rows,
          ": from 1 to 2^31 - 1");
  require(kept.is(ncclepInt32, {num_tokens_of(plan), plan.top_k}),
          "the assignments that are kept must be int32 [", num_tokens_of(plan), ", ", plan.top_k,
          "] for this plan, not ", shape_of(kept));
  require(!lacked || lacked->is(ncclepInt64, {control.num_ranks}),
          "the rows that ranks lacked must be int64 [", control.num_ranks, "]");
}

void check_routes(const Tensor& routes, std::int64_t size) {
  require(routes.dtype == ncclepInt32 && routes.num_elements() >= size,
          "a plan's routes must be int32 [", size, "], not ", shape_of(routes));
}

void check_rows(Phase phase, const Plan& plan, std::size_t max_row_bytes, const Tensor& token_rows,
                const std::optional<Tensor>& topk_w, const Tensor& rows,
                const std::optional<Tensor>& row_w) {
  const bool is_dispatch = phase == Phase::kDispatch;
  const char* what = is_dispatch ? "dispatch" : "combine";
  require(token_rows.ndim == 2 && rows.ndim == 2 && token_rows.shape[1] == rows.shape[1] &&
              token_rows.dtype == rows.dtype,
          what, ": rows ", shape_of(token_rows), " and ", shape_of(rows),
          " must have the same hidden size and the same dtype");
  require(rows.dtype == ncclepFloat32 || rows.dtype == ncclepFloat16 ||
              rows.dtype == ncclepBfloat16 || (is_dispatch && rows.dtype == ncclepUint8),
          what, ": rows must be bf16, fp16 or fp32", is_dispatch ? ", or bytes" : "");
  const auto itemsize = static_cast<std::size_t>(itemsize_of(rows.dtype));
  const auto hidden = static_cast<std::size_t>(rows.shape[1]);
  require(0 < hidden && hidden <= max_row_bytes / itemsize && hidden * itemsize % kVector == 0,
          what, ": rows of ", hidden, " numbers of ", itemsize, " bytes must have a multiple of ",
          kVector, " bytes, and the windows are for ", max_row_bytes, " at most");
  for (const Tensor* tensor : {&token_rows, &rows}) {
    require(reinterpret_cast<std::uintptr_t>(tensor->data) % kVector == 0, what,
            ": rows must start at a multiple of ", kVector, " bytes, not at ", tensor->data);
  }
  require(token_rows.shape[0] == num_tokens_of(plan) && rows.shape[0] == plan.num_rows, what,
          ": rows ", shape_of(token_rows), " at the source rank and ", shape_of(rows),
          " at the experts, but the plan has ", num_tokens_of(plan), " and ", plan.num_rows);
  require(topk_w.has_value() == row_w.has_value(), what,
          ": weights must be given on both sides or on neither");
  if (!topk_w) return;
  require(topk_w->is(ncclepFloat32, {num_tokens_of(plan), plan.top_k}) &&
              row_w->is(ncclepFloat32, {plan.num_rows}),
          what, ": weights must be fp32 [", num_tokens_of(plan), ", ", plan.top_k, "] and [",
          plan.num_rows, "], not ", shape_of(*topk_w), " and ", shape_of(*row_w));
}

void check_sums(const std::optional<Tensor>& sums, std::int64_t num_sums, const Tensor& rows) {
  require(sums || num_sums == 0, "combine: ", num_sums, " sums need scratch");
  if (!sums) return;
  require(
      sums->ndim == 2 && sums->dtype == rows.dtype && sums->shape[1] == rows.shape[1] &&
          sums->shape[0] >= num_sums && reinterpret_cast<std::uintptr_t>(sums->data) % kVector == 0,
      "combine: scratch for the sums must match the rows' hidden size and dtype, with at least ",
      num_sums, " rows, not ", shape_of(*sums));
}

}  // namespace ncclep::native
