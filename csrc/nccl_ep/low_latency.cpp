#include "nccl_ep/low_latency.h"

#include <initializer_list>
#include <utility>
#include <vector>

#include "nccl_ep/argument.h"

namespace ncclep::nccl_ep {

LowLatencyHandle::LowLatencyHandle(std::shared_ptr<Group> group, int top_k)
    : HandleOwner(std::move(group), top_k) {
  const GroupOptions& options = group_->options();
  require(options.low_latency, "the NCCL EP group is not of low-latency mode");
  require(0 < top_k && static_cast<unsigned>(top_k) <= options.top_k, "top-k ", top_k,
          ": the group is for ", options.top_k, " at most");
  init(kRankMajor, nullptr, nullptr);
}

void LowLatencyHandle::require_rows(const char* call, const Tensor& tokens,
                                    const Tensor& rows) const {
  const GroupOptions& options = group_->options();
  // The library aborts the process on a type that it does not expect; bf16 is known to work.
  require(tokens.dtype == ncclepBfloat16 && tokens.ndim == 2 && 0 < tokens.shape[0] &&
              tokens.shape[0] <= options.max_tokens && 0 < tokens.shape[1] &&
              static_cast<std::uint64_t>(tokens.shape[1]) * itemsize_of(tokens.dtype) <=
                  options.row_bytes,
          call, " needs 1 to ", options.max_tokens, " tokens of bf16 in rows of at most ",
          options.row_bytes, " bytes");
  require(rows.is(tokens.dtype, {group_->num_ranks(), options.max_tokens, tokens.shape[1]}), call,
          " needs rows [", group_->num_ranks(), ", ", options.max_tokens, ", ", tokens.shape[1],
          "] of the tokens' dtype");
}

void LowLatencyHandle::dispatch(const Tensor& x, const Tensor& topk_idx, const Tensor& w,
                                const Tensor& rows, const Tensor& row_topk_idx, const Tensor& row_w,
                                const Tensor& counts, std::uintptr_t stream) {
  require_rows("ncclEpDispatch", x, rows);
  const std::int64_t num_tokens = x.shape[0];
  const int num_ranks = group_->num_ranks(), max_tokens = group_->options().max_tokens;
  require(
      topk_idx.is(ncclepInt64, {num_tokens, top_k_}) && w.is(ncclepFloat32, {num_tokens, top_k_}),
      "ncclEpDispatch needs topk_idx int64 and weights fp32 [", num_tokens, ", ", top_k_, "]");
  require(row_topk_idx.is(ncclepInt32, {num_ranks, max_tokens, top_k_}) &&
              row_w.is(ncclepFloat32, {num_ranks, max_tokens, top_k_}) &&
              counts.is(ncclepInt32, {num_ranks}),
          "ncclEpDispatch writes experts int32 and weights fp32 [", num_ranks, ", ", max_tokens,
          ", ", top_k_, "], and counts int32 [", num_ranks, "]");
  Argument routes(topk_idx, nullptr), in(x, nullptr), in_w(w, nullptr);
  Argument out(rows, nullptr), out_topk(row_topk_idx, nullptr), out_w(row_w, nullptr);
  Argument from(counts, nullptr);
  update(routes.get(), nullptr, stream);
  DispatchInputs inputs;
  inputs.tokens = in.get();
  inputs.topk_weights = in_w.get();
  DispatchOutputs outputs;
  outputs.tokens = out.get();
  outputs.topk_weights = out_w.get();
  outputs.topk_idx = out_topk.get();
  LayoutInfo layout;
  layout.src_rank_counters = from.get();
  HandleOwner::dispatch(inputs, outputs, &layout, DispatchConfig(), stream);
}

void LowLatencyHandle::combine(const Tensor& y, const Tensor& out, std::uintptr_t stream) {
  require_rows("ncclEpCombine", out, y);
  Argument in(y, nullptr), sum(out, nullptr);
  CombineInputs inputs;
  inputs.tokens = in.get();
  CombineOutputs outputs;
  outputs.tokens = sum.get();
  HandleOwner::combine(inputs, outputs, CombineConfig(), stream);
}

}  // namespace ncclep::nccl_ep
