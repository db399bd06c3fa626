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
                   std::initializer_list<std::int64_t> shape) {
  require(tensor.is(dtype, shape), what, " does not have the dtype and shape of this object");
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % kVector == 0 || itemsize_of(dtype) == 8 ||
              dtype == ncclepInt32,
          what, " must start at a multiple of ", kVector, " bytes");
}

}  // namespace

LowLatencyWindow low_latency_window(int num_ranks, int num_domains,
                                    const ncclepLowLatencyConfig_t& sizes) {
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
  require(
      sizes.dtype == ncclepBfloat16 || sizes.dtype == ncclepFloat16 || sizes.dtype == ncclepFloat32,
      "combined rows must be bf16, fp16 or fp32");
  require(sizes.payload == sizes.dtype || sizes.payload == ncclepUint8,
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

LowLatencyWindow layout_of(const Communicator& communicator,
                           const ncclepLowLatencyConfig_t& sizes) {
  return low_latency_window(communicator.num_ranks(), communicator.num_domains(), sizes);
}

}  // namespace

std::shared_ptr<LowLatency> LowLatency::make(std::shared_ptr<Group> group,
                                             const ncclepLowLatencyConfig_t& sizes,
                                             const AllGather& all_gather) {
  layout_of(*group->communicator(), sizes);  // throws on all ranks alike
  if (group->windows().empty()) {
    group->reserve({sizeof(ncclepShape_t), kChunk, sizes.top_k, kVector}, 0, all_gather);
  }
  std::shared_ptr<LowLatency> made;
  const Agreement agreement(all_gather, group->communicator()->num_ranks(), "low-latency mode");
  agreement.on_all_ranks(
      "allocating a low-latency window", [&] { made = std::make_shared<LowLatency>(group, sizes); },
      "if GPU memory ran out: use fewer tokens");
  try {
    open_checked(*made, *group->communicator(), agreement, {"low-latency"});
  } catch (...) {
    made->discard_windows();
    throw;
  }
  return made;
}

LowLatency::LowLatency(std::shared_ptr<Group> group, const ncclepLowLatencyConfig_t& sizes)
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

void LowLatency::discard_windows() {
  rails_.reset();
  window_.reset();
  cuda_check(cudaFree(std::exchange(state_, nullptr)), "cudaFree");
}

void LowLatency::close() {
  if (window_ == nullptr) return;
  group_->wait_for_calls("closing its window", group_->longest_timeout());
  group_->drain_network();
  window_->close();
  discard_windows();
}

std::vector<std::shared_ptr<Window>> LowLatency::windows() const {
  if (window_ == nullptr) return {};
  return {window_};
}

void LowLatency::require_open() const {
  require(window_ != nullptr, "the low-latency object was closed");
}

ncclepLowLatencyBuffers_t LowLatency::buffers() const {
  require_open();
  require(window_->is_open(), "the low-latency window is not open");
  // Through the address that the kernels write to: two mappings of the same memory need not be
  // coherent.
  const Communicator& all = *group_->communicator();
  char* const own = window_->peers()[all.rank() - all.rank_in_domain(0)];
  ncclepLowLatencyBuffers_t found = NCCLEP_LOW_LATENCY_BUFFERS_INIT;
  found.rows = own + layout_.rows();
  found.scales = reinterpret_cast<float*>(own + layout_.scales());
  found.experts = reinterpret_cast<std::int32_t*>(own + layout_.experts());
  found.weights = reinterpret_cast<float*>(own + layout_.weights());
  found.num_bytes = window_->num_bytes();
  return found;
}

LowLatencyContext LowLatency::context() const {
  require(window_->is_open(), "the low-latency window is not open");
  LowLatencyContext ll{};
  ll.window = layout_;
  ll.window_of = windows_of_domain(*group_->communicator(), *window_);
  ll.state = state_;
  return ll;
}

void LowLatency::dispatch(const ncclepLowLatencyDispatch_t& given) {
  require_open();
  const Tensor counts = tensor_at(given.counts, "counts");
  require_shape("counts", counts, ncclepInt32, {layout_.num_ranks});
  LowLatencyDispatch job{};
  job.counts = static_cast<std::int32_t*>(counts.data);
  job.sends = given.x != nullptr;
  job.completes = !job.sends || given.completes != 0;
  const int num_ctas = job.sends ? given.num_ctas : kCompletingCtas;
  if (job.sends) {
    const Tensor x = tensor_at(given.x, "x"), topk_idx = tensor_at(given.topk_idx, "topk_idx");
    const Tensor weights = tensor_at(given.weights, "weights");
    const auto scales = optional_tensor(given.scales, "scales");
    const std::int64_t num_tokens = x.ndim == 0 ? 0 : x.shape[0];
    require(num_tokens <= sizes_.max_tokens, num_tokens, " tokens: at most ", sizes_.max_tokens);
    require_shape("x", x, sizes_.payload, {num_tokens, sizes_.hidden});
    require(scales.has_value() == (sizes_.num_scales > 0), "scales must come with such rows only");
    if (scales) require_shape("scales", *scales, ncclepFloat32, {num_tokens, sizes_.num_scales});
    require_shape("topk_idx", topk_idx, topk_idx.dtype == ncclepInt32 ? ncclepInt32 : ncclepInt64,
                  {num_tokens, sizes_.top_k});
    require(weights.is(ncclepFloat32, {num_tokens, sizes_.top_k}), "weights must be fp32 [T, K]");
    group_->check_num_ctas(num_ctas);
    job.x = static_cast<const char*>(x.data);
    if (scales) job.scales = static_cast<const char*>(scales->data);
    job.weights = static_cast<const float*>(weights.data);
    job.topk_idx = topk_idx.data;
    job.is_int64 = topk_idx.dtype == ncclepInt64;
    job.num_tokens = static_cast<int>(num_tokens);
  }
  const std::uintptr_t stream = number_of(given.stream);
  auto turn = group_->take_turn(stream);
  low_latency_dispatch(group_->context(), context(), job, num_ctas, stream, rails_.get());
  turn.end();
  if (job.sends) num_tokens_ = job.num_tokens;
}

void LowLatency::combine(const ncclepLowLatencyCombine_t& given) {
  require_open();
  const Tensor y = tensor_at(given.y, "y"), out = tensor_at(given.out, "out");
  const auto rows_of = optional_tensor(given.rows_of, "rows_of");
  require(given.sends || given.completes, "a combine must send, complete or do both");
  const std::int64_t num_rows =
      rows_of && y.ndim > 0 ? y.shape[0] : static_cast<std::int64_t>(layout_.num_rows());
  require(num_rows <= INT32_MAX, num_rows, " rows: at most 2^31 - 1");
  require_shape("y", y, sizes_.dtype, {num_rows, sizes_.hidden});
  if (rows_of) {
    require_shape("rows_of", *rows_of, ncclepInt32,
                  {layout_.num_ranks, sizes_.max_tokens, sizes_.top_k});
  }
  require_shape("out", out, sizes_.dtype, {num_tokens_, sizes_.hidden});
  group_->check_num_ctas(given.num_ctas);
  LowLatencyCombine job{};
  job.sends = given.sends != 0;
  job.completes = given.completes != 0;
  job.y = static_cast<const char*>(y.data);
  if (rows_of) job.rows_of = static_cast<const std::int32_t*>(rows_of->data);
  job.num_rows = static_cast<int>(num_rows);
  job.out = static_cast<char*>(out.data);
  job.num_tokens = static_cast<int>(num_tokens_);
  job.dtype = sizes_.dtype;
  const std::uintptr_t stream = number_of(given.stream);
  auto turn = group_->take_turn(stream);
  low_latency_combine(group_->context(), context(), job, given.num_ctas, stream, rails_.get());
  turn.end();
}

}  // namespace ncclep::native
