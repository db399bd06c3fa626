#include "native/low_latency/host.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "common/cuda.h"
#include "common/error.h"
#include "native/device/rails.h"
#include "native/host/window_check.h"

namespace ncclep::native {

namespace {

constexpr int kVector = 16;  // bytes that the kernels copy at a time
constexpr int kMaxHidden = 1 << 20;
// Of the second half of a dispatch over several domains, which sends rail peers' tokens on.
constexpr int kCompletingCtas = 8;

void require_shape(const char* what, const Tensor& tensor, DType dtype,
                   const std::vector<std::int64_t>& shape) {
  require(tensor.dtype == dtype && tensor.shape == shape, what,
          " does not have the dtype and shape of this object");
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % kVector == 0 || itemsize_of(dtype) == 8 ||
              dtype == DType::kInt32,
          what, " must start at a multiple of ", kVector, " bytes");
}

}  // namespace

LowLatencyWindow low_latency_window(int num_ranks, int num_domains, const LowLatencySizes& sizes) {
  require(num_ranks / num_domains <= kWarpSize, num_ranks / num_domains,
          " ranks of one NVLink domain in low-latency mode: at most ", kWarpSize);
  require(0 < sizes.max_tokens && sizes.max_tokens <= kLowLatencyTokens, sizes.max_tokens,
          " tokens: from 1 to ", kLowLatencyTokens);
  require(0 < sizes.top_k && sizes.top_k <= kMaxTopK, "top-k ", sizes.top_k, ": from 1 to ",
          kMaxTopK);
  require(0 < sizes.hidden && sizes.hidden <= kMaxHidden && 0 <= sizes.num_scales &&
              sizes.num_scales <= kMaxHidden,
          "rows of ", sizes.hidden, " numbers and ", sizes.num_scales, " scales: at most ",
          kMaxHidden);
  require(sizes.dtype == DType::kBFloat16 || sizes.dtype == DType::kFloat16 ||
              sizes.dtype == DType::kFloat32,
          "combined rows must be bf16, fp16 or fp32");
  require(sizes.payload == sizes.dtype || sizes.payload == DType::kUint8,
          "dispatched rows must have the dtype of combined rows, or be bytes");
  LowLatencyWindow layout{};
  layout.num_ranks = num_ranks;
  layout.num_domains = num_domains;
  layout.max_tokens = sizes.max_tokens;
  layout.top_k = sizes.top_k;
  layout.row_bytes = sizes.hidden * itemsize_of(sizes.payload);
  layout.scale_bytes = sizes.num_scales * 4;
  layout.sum_bytes = sizes.hidden * itemsize_of(sizes.dtype);
  for (const int num_bytes : {layout.row_bytes, layout.scale_bytes, layout.sum_bytes}) {
    require(num_bytes % kVector == 0, "a row of ", num_bytes, " bytes: must be a multiple of ",
            kVector);
  }
  return layout;
}

namespace {

LowLatencyWindow layout_of(const Communicator& communicator, const LowLatencySizes& sizes) {
  const int num_ranks = communicator.num_ranks();
  return low_latency_window(num_ranks, num_ranks / communicator.lsa_size(), sizes);
}

}  // namespace

std::shared_ptr<LowLatency> LowLatency::make(std::shared_ptr<Group> group,
                                             const LowLatencySizes& sizes,
                                             const AllGather& all_gather) {
  layout_of(*group->communicator(), sizes);  // throws on all ranks alike
  if (group->windows().empty()) {
    group->reserve(kChunk, sizes.top_k, kVector, 0, all_gather);
  }
  std::shared_ptr<LowLatency> made;
  const Agreement agreement(all_gather, group->communicator()->num_ranks(), "low-latency mode");
  agreement.on_all_ranks(
      "allocating a low-latency window",
      [&] {
        made = std::make_shared<LowLatency>(group, sizes);
        return std::string();
      },
      "if GPU memory ran out: use fewer tokens");
  try {
    open_checked(*made, *group->communicator(), agreement, {"low-latency"});
  } catch (...) {
    made->drop();
    throw;
  }
  return made;
}

LowLatency::LowLatency(std::shared_ptr<Group> group, const LowLatencySizes& sizes)
    : group_(std::move(group)), sizes_(sizes), layout_(layout_of(*group_->communicator(), sizes)) {
  const Reach reach = group_->network() != nullptr ? Reach::kNetwork : Reach::kDomain;
  window_ = std::make_shared<Window>(group_->communicator(), layout_.num_bytes(), reach);
  cuda_check(cudaMalloc(&state_, sizeof(LowLatencyState)), "cudaMalloc");
}

LowLatency::~LowLatency() = default;  // see the class comment

void LowLatency::open() {
  require_open();
  window_->open();
  if (group_->network() != nullptr) rails_ = make_rails(*group_->network(), {window_});
}

void LowLatency::clear() {
  require_open();
  clear_memory(window_->address(), window_->num_bytes());
  clear_memory(state_, sizeof(LowLatencyState));
}

void LowLatency::drop() {
  rails_.reset();
  window_.reset();
  cuda_check(cudaFree(std::exchange(state_, nullptr)), "cudaFree");
}

void LowLatency::close() {
  if (window_ == nullptr) return;
  group_->wait_for_calls("closing its window", group_->longest_timeout());
  group_->settle();
  window_->close();
  drop();
}

std::vector<std::shared_ptr<Window>> LowLatency::windows() const {
  if (window_ == nullptr) return {};
  return {window_};
}

void LowLatency::require_open() const {
  require(window_ != nullptr, "the low-latency object was closed");
}

std::uintptr_t LowLatency::address(std::size_t offset) const {
  require_open();
  require(window_->is_open(), "the low-latency window is not open");
  // Through the address that the kernels write to: two mappings of the same memory need not be
  // coherent.
  const Communicator& all = *group_->communicator();
  const int place = all.rank() - all.rank_in_domain(0);
  return reinterpret_cast<std::uintptr_t>(window_->peers()[place] + offset);
}

LowLatencyContext LowLatency::context() const {
  require(window_->is_open(), "the low-latency window is not open");
  LowLatencyContext ll{};
  ll.window = layout_;
  ll.window_of = windows_of_domain(*group_->communicator(), *window_);
  ll.state = state_;
  return ll;
}

void LowLatency::dispatch(const Tensor& x, const std::optional<Tensor>& scales,
                          const Tensor& topk_idx, const Tensor& weights, const Tensor& counts,
                          bool completes, int num_ctas, std::uintptr_t stream) {
  require_open();
  const std::int64_t num_tokens = x.shape.empty() ? 0 : x.shape[0];
  require(num_tokens <= sizes_.max_tokens, num_tokens, " tokens: at most ", sizes_.max_tokens);
  require_shape("x", x, sizes_.payload, {num_tokens, sizes_.hidden});
  require(scales.has_value() == (sizes_.num_scales > 0), "scales must come with such rows only");
  if (scales) require_shape("scales", *scales, DType::kFloat32, {num_tokens, sizes_.num_scales});
  require_shape("topk_idx", topk_idx,
                topk_idx.dtype == DType::kInt32 ? DType::kInt32 : DType::kInt64,
                {num_tokens, sizes_.top_k});
  require(weights.dtype == DType::kFloat32 && weights.shape == topk_idx.shape,
          "weights must be fp32 [T, K]");
  require_shape("counts", counts, DType::kInt32, {layout_.num_ranks});
  group_->check_num_ctas(num_ctas);
  LowLatencyDispatch job{};
  job.sends = true;
  job.completes = completes;
  job.x = static_cast<const char*>(x.data);
  if (scales) job.scales = static_cast<const char*>(scales->data);
  job.weights = static_cast<const float*>(weights.data);
  job.topk_idx = topk_idx.data;
  job.is_int64 = topk_idx.dtype == DType::kInt64;
  job.num_tokens = static_cast<int>(num_tokens);
  job.counts = static_cast<std::int32_t*>(counts.data);
  queue_dispatch(job, num_ctas, stream);
  num_tokens_ = num_tokens;
}

void LowLatency::complete_dispatch(const Tensor& counts, std::uintptr_t stream) {
  require_open();
  require_shape("counts", counts, DType::kInt32, {layout_.num_ranks});
  LowLatencyDispatch job{};
  job.completes = true;
  job.counts = static_cast<std::int32_t*>(counts.data);
  queue_dispatch(job, kCompletingCtas, stream);
}

void LowLatency::queue_dispatch(const LowLatencyDispatch& job, int num_ctas,
                                std::uintptr_t stream) {
  group_->queue(stream, [&] {
    low_latency_dispatch(group_->context(), context(), job, num_ctas, stream, rails_.get());
  });
}

void LowLatency::combine(const Tensor& y, const std::optional<Tensor>& rows_of, const Tensor& out,
                         bool sends, bool completes, int num_ctas, std::uintptr_t stream) {
  require_open();
  require(sends || completes, "a combine must send, complete or do both");
  const std::int64_t num_rows =
      rows_of && !y.shape.empty() ? y.shape[0] : static_cast<std::int64_t>(layout_.places());
  require(num_rows <= INT32_MAX, num_rows, " rows: at most 2^31 - 1");
  require_shape("y", y, sizes_.dtype, {num_rows, sizes_.hidden});
  if (rows_of) {
    require_shape("rows_of", *rows_of, DType::kInt32,
                  {layout_.num_ranks, sizes_.max_tokens, sizes_.top_k});
  }
  require_shape("out", out, sizes_.dtype, {num_tokens_, sizes_.hidden});
  group_->check_num_ctas(num_ctas);
  LowLatencyCombine job{};
  job.sends = sends;
  job.completes = completes;
  job.y = static_cast<const char*>(y.data);
  if (rows_of) job.rows_of = static_cast<const std::int32_t*>(rows_of->data);
  job.num_rows = static_cast<int>(num_rows);
  job.out = static_cast<char*>(out.data);
  job.num_tokens = static_cast<int>(num_tokens_);
  job.dtype = sizes_.dtype;
  group_->queue(stream, [&] {
    low_latency_combine(group_->context(), context(), job, num_ctas, stream, rails_.get());
  });
}

}  // namespace ncclep::native
