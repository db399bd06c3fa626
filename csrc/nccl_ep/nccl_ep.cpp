#include "nccl_ep/nccl_ep.h"

#include <initializer_list>
#include <utility>

#include "nccl_ep/argument.h"

namespace ncclep::nccl_ep {

namespace {

constexpr double kMaxTimeout = 1e9;  // seconds

std::optional<Argument>& emplace(std::optional<Argument>& slot, const std::optional<Tensor>& tensor,
                                 void* any) {
  if (tensor) slot.emplace(*tensor, any);
  return slot;
}

TensorArgument* get(std::optional<Argument>& argument) {
  return argument ? argument->get() : nullptr;
}

void check(const GroupOptions& options, int num_ranks) {
  const auto ranks = static_cast<unsigned>(num_ranks);
  require(options.num_experts > 0 && options.num_experts % ranks == 0, options.num_experts,
          " experts for NCCL EP: a positive multiple of the ", ranks, " ranks");
  for (const unsigned number : {options.num_experts, options.max_tokens, options.max_recv_rows,
                                options.row_bytes, options.top_k, options.num_sms}) {
    require(number <= INT32_MAX, number, " is too large for NCCL EP: it must be less than 2^31");
  }
  require(options.max_tokens > 0 && options.row_bytes > 0 && options.top_k > 0,
          "NCCL EP needs max_tokens, row_bytes and top_k, not ", options.max_tokens, ", ",
          options.row_bytes, " and ", options.top_k);
  // Must fit in 64 bits as nanoseconds.
  require(options.timeout_s > 0 && options.timeout_s <= kMaxTimeout, "a deadline of ",
          options.timeout_s, " s: it must be positive, and at most ", kMaxTimeout);
}

bool is_rows(const Tensor& tensor) {
  return tensor.ndim == 2 && (tensor.dtype == ncclepFloat32 || tensor.dtype == ncclepFloat16 ||
                              tensor.dtype == ncclepBfloat16);
}

// `tokens` [T, H] and `topk_w` [T, K], `rows` [N, H] and `row_w` [N]; the weights are both given or
// both absent.
void check_rows(const char* call, const GroupOptions& options, int top_k, const Tensor& tokens,
                const std::optional<Tensor>& topk_w, const Tensor& rows,
                const std::optional<Tensor>& row_w) {
  require(is_rows(tokens) && is_rows(rows) && tokens.dtype == rows.dtype &&
              tokens.shape[1] == rows.shape[1],
          call, " needs rows [T, H] and [N, H] of one dtype: bf16, fp16 or fp32");
  const std::uint64_t row_bytes =
      static_cast<std::uint64_t>(rows.shape[1]) * itemsize_of(rows.dtype);
  require(tokens.shape[0] <= options.max_tokens && 0 < row_bytes && row_bytes <= options.row_bytes,
          call, ": ", tokens.shape[0], " tokens and rows of ", row_bytes,
          " bytes: the group is for ", options.max_tokens, " and ", options.row_bytes);
  require(topk_w.has_value() == row_w.has_value(), call,
          ": weights must be given on both sides or on neither");
  if (!topk_w) return;
  require(topk_w->is(ncclepFloat32, {tokens.shape[0], top_k}) &&
              row_w->is(ncclepFloat32, {rows.shape[0]}),
          call, " needs fp32 weights [T, K] and [N] for ", tokens.shape[0], " tokens, top-k ",
          top_k, " and ", rows.shape[0], " rows");
}

void* stream_of(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

}  // namespace

Library::Library(const std::string& path) : library_(path) {
  NcclResult (*get_version)(int*);
  library_.find("ncclEpGetVersion", get_version);
  require(get_version(&version_) == 0, "ncclEpGetVersion failed");
  require(version_ / 100 == 2, path, " is version ", version_ / 10000, ".", version_ / 100 % 100,
          ".", version_ % 100, ": this binding knows the interface of 0.2 only");
  library_.find("ncclEpCreateGroup", create_group);
  library_.find("ncclEpGroupDestroy", destroy_group);
  library_.find("ncclEpHandleMemSize", handle_mem_size);
  library_.find("ncclEpInitHandle", init_handle);
  library_.find("ncclEpUpdateHandle", update_handle);
  library_.find("ncclEpHandleDestroy", destroy_handle);
  library_.find("ncclEpDispatch", dispatch);
  library_.find("ncclEpCombine", combine);
}

Group::Group(std::shared_ptr<Library> library, std::shared_ptr<Communicator> communicator,
             const GroupOptions& options)
    : library_(std::move(library)), communicator_(std::move(communicator)), options_(options) {
  check(options, communicator_->num_ranks());
  GroupConfig config;
  config.algorithm = options.low_latency ? kLowLatency : kHighThroughput;
  config.num_experts = options.num_experts;
  config.max_dispatch_tokens_per_rank = options.max_tokens;
  config.max_recv_tokens_per_rank = options.max_recv_rows;
  config.max_token_bytes = options.row_bytes;
  config.max_num_sms = options.num_sms;
  config.num_topk = options.top_k;
  config.timeout_ns = static_cast<std::uint64_t>(options.timeout_s * 1e9);
  nccl().check(library_->create_group(&group_, communicator_->get(), &config), "ncclEpCreateGroup");
}

void Group::close() {
  if (group_ == nullptr) return;
  nccl().check(library_->destroy_group(std::exchange(group_, nullptr)), "ncclEpGroupDestroy");
}

void* Group::get() const {
  require(group_ != nullptr, "the NCCL EP group was closed");
  return group_;
}

std::size_t Group::handle_bytes(std::size_t alignment, int top_k) const {
  require(!options_.low_latency,
          "the NCCL EP group is of low-latency mode: it has no such handles");
  require(0 < alignment && alignment <= INT32_MAX, "alignment ", alignment,
          ": positive, less than 2^31");
  require(0 < top_k && static_cast<unsigned>(top_k) <= options_.top_k, "top-k ", top_k,
          ": the group is for ", options_.top_k, " at most");
  HandleConfig config;
  config.alignment = alignment;
  std::size_t bytes = 0;
  nccl().check(library_->handle_mem_size(get(), kExpertMajor, &config, &bytes, top_k),
               "ncclEpHandleMemSize");
  return bytes;
}

HandleOwner::~HandleOwner() {
  // Closing a group also destroys its handles.
  if (handle_ != nullptr && !group_->is_closed()) group_->library().destroy_handle(handle_);
}

void HandleOwner::close() {
  if (handle_ == nullptr || group_->is_closed()) return;
  group_->nccl().check(group_->library().destroy_handle(std::exchange(handle_, nullptr)),
                       "ncclEpHandleDestroy");
}

void HandleOwner::init(int layout, const HandleConfig* config, const TensorArgument* memory) {
  group_->nccl().check(
      group_->library().init_handle(&handle_, group_->get(), layout, config, top_k_, memory),
      "ncclEpInitHandle");
}

void* HandleOwner::get() const {
  require(handle_ != nullptr && !group_->is_closed(), "the NCCL EP handle was closed");
  return handle_;
}

void HandleOwner::update(const TensorArgument* topk_idx, const LayoutInfo* layout,
                         std::uintptr_t stream) {
  group_->nccl().check(group_->library().update_handle(get(), topk_idx, layout, stream_of(stream)),
                       "ncclEpUpdateHandle");
}

void HandleOwner::dispatch(const DispatchInputs& inputs, const DispatchOutputs& outputs,
                           const LayoutInfo* layout, const DispatchConfig& config,
                           std::uintptr_t stream) {
  group_->nccl().check(
      group_->library().dispatch(get(), &inputs, &outputs, layout, &config, stream_of(stream)),
      "ncclEpDispatch");
}

void HandleOwner::combine(const CombineInputs& inputs, const CombineOutputs& outputs,
                          const CombineConfig& config, std::uintptr_t stream) {
  group_->nccl().check(
      group_->library().combine(get(), &inputs, &outputs, &config, stream_of(stream)),
      "ncclEpCombine");
}

Handle::Handle(std::shared_ptr<Group> group, std::size_t alignment, int top_k, const Tensor& memory)
    : HandleOwner(std::move(group), top_k), memory_(memory.data) {
  const std::size_t needed = group_->handle_bytes(alignment, top_k);
  require(memory.dtype == ncclepUint8 && memory.ndim == 1 &&
              static_cast<std::size_t>(memory.num_elements()) >= needed,
          "a handle's memory must be uint8 [", needed, "], not ", memory.num_elements(),
          " elements");
  HandleConfig config;
  config.alignment = alignment;
  Argument memory_argument(memory, nullptr);
  init(kExpertMajor, &config, memory_argument.get());
}

void Handle::update(const Tensor& topk_idx, const Tensor& expert_counts, const Tensor& num_rows,
                    std::uintptr_t stream) {
  const GroupOptions& options = group_->options();
  require((topk_idx.dtype == ncclepInt32 || topk_idx.dtype == ncclepInt64) && topk_idx.ndim == 2 &&
              topk_idx.shape[0] <= options.max_tokens && topk_idx.shape[1] == top_k_,
          "ncclEpUpdateHandle needs topk_idx int32 or int64 [at most ", options.max_tokens, ", ",
          top_k_, "]");
  const std::int64_t num_local = options.num_experts / group_->num_ranks();
  require(expert_counts.dtype == ncclepInt64 && expert_counts.ndim == 1 &&
              expert_counts.shape[0] == num_local && num_rows.dtype == ncclepInt64 &&
              num_rows.num_elements() == 1,
          "ncclEpUpdateHandle writes counts to int64 [", num_local, "] and [1]");
  Argument topk(topk_idx, memory_), counts(expert_counts, memory_), total(num_rows, memory_);
  LayoutInfo layout;
  layout.expert_counters = counts.get();
  layout.recv_total_counter = total.get();
  HandleOwner::update(topk.get(), &layout, stream);
}

void Handle::dispatch(const Tensor& x, const std::optional<Tensor>& w, const Tensor& rows,
                      const std::optional<Tensor>& row_w, std::uintptr_t stream) {
  check_rows("ncclEpDispatch", group_->options(), top_k_, x, w, rows, row_w);
  Argument in(x, memory_), out(rows, memory_);
  std::optional<Argument> in_w, out_w;
  DispatchInputs inputs;
  inputs.tokens = in.get();
  inputs.topk_weights = nccl_ep::get(emplace(in_w, w, memory_));
  DispatchOutputs outputs;
  outputs.tokens = out.get();
  outputs.topk_weights = nccl_ep::get(emplace(out_w, row_w, memory_));
  DispatchConfig config;
  config.direction = w ? kForward : kBackward;
  HandleOwner::dispatch(inputs, outputs, nullptr, config, stream);
}

void Handle::combine(const Tensor& y, const std::optional<Tensor>& w, const Tensor& out,
                     const std::optional<Tensor>& topk_w, std::uintptr_t stream) {
  check_rows("ncclEpCombine", group_->options(), top_k_, out, topk_w, y, w);
  Argument in(y, memory_), sum(out, memory_);
  std::optional<Argument> in_w, out_w;
  CombineInputs inputs;
  inputs.tokens = in.get();
  inputs.topk_weights = nccl_ep::get(emplace(in_w, w, memory_));
  CombineOutputs outputs;
  outputs.tokens = sum.get();
  outputs.topk_weights = nccl_ep::get(emplace(out_w, topk_w, memory_));
  CombineConfig config;
  config.direction = w ? kBackward : kForward;
  HandleOwner::combine(inputs, outputs, config, stream);
}

}  // namespace ncclep::nccl_ep
