#include "nccl_ep/nccl_ep.h"

#include <utility>
#include <vector>

namespace ncclep::nccl_ep {

namespace {

int datatype_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return kNcclUint8;
    case DType::kInt32:
      return kNcclInt32;
    case DType::kInt64:
      return kNcclInt64;
    case DType::kFloat16:
      return kNcclFloat16;
    case DType::kBFloat16:
      return kNcclBFloat16;
    case DType::kFloat32:
      return kNcclFloat32;
    case DType::kFloat64:
      break;  // the library moves none
  }
  fail("no NCCL datatype for dtype ", static_cast<int>(dtype));
}

// A tensor as the library takes it.  It refuses null even for no elements: `any` is passed instead.
class Argument {
 public:
  Argument(const Tensor& tensor, void* any) : sizes_(tensor.shape.begin(), tensor.shape.end()) {
    argument_.num_dimensions = static_cast<unsigned>(sizes_.size());
    argument_.datatype = datatype_of(tensor.dtype);
    argument_.data = tensor.num_elements() == 0 ? any : tensor.data;
    argument_.sizes = sizes_.data();
  }
  Argument(const Argument&) = delete;

  TensorArgument* get() { return &argument_; }

 private:
  std::vector<std::size_t> sizes_;
  TensorArgument argument_;
};

std::optional<Argument>& emplace(std::optional<Argument>& slot, const std::optional<Tensor>& tensor,
                                 void* any) {
  if (tensor) slot.emplace(*tensor, any);
  return slot;
}

TensorArgument* get(std::optional<Argument>& argument) {
  return argument ? argument->get() : nullptr;
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
    : library_(std::move(library)), communicator_(std::move(communicator)) {
  GroupConfig config;
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
  HandleConfig config;
  config.alignment = alignment;
  std::size_t bytes = 0;
  nccl().check(library_->handle_mem_size(get(), kExpertMajor, &config, &bytes, top_k),
               "ncclEpHandleMemSize");
  return bytes;
}

Handle::Handle(std::shared_ptr<Group> group, std::size_t alignment, int top_k, const Tensor& memory)
    : group_(std::move(group)), memory_(memory.data) {
  HandleConfig config;
  config.alignment = alignment;
  Argument memory_argument(memory, nullptr);
  group_->nccl().check(group_->library().init_handle(&handle_, group_->get(), kExpertMajor, &config,
                                                     top_k, memory_argument.get()),
                       "ncclEpInitHandle");
}

Handle::~Handle() {
  // A closed group took its handles with it.
  if (handle_ != nullptr && !group_->is_closed()) group_->library().destroy_handle(handle_);
}

void Handle::close() {
  if (handle_ == nullptr || group_->is_closed()) return;
  group_->nccl().check(group_->library().destroy_handle(std::exchange(handle_, nullptr)),
                       "ncclEpHandleDestroy");
}

void* Handle::get() const {
  require(handle_ != nullptr && !group_->is_closed(), "the NCCL EP handle was closed");
  return handle_;
}

void Handle::update(const Tensor& topk_idx, const Tensor& expert_counts, const Tensor& num_rows,
                    std::uintptr_t stream) {
  Argument topk(topk_idx, memory_), counts(expert_counts, memory_), total(num_rows, memory_);
  LayoutInfo layout;
  layout.expert_counters = counts.get();
  layout.recv_total_counter = total.get();
  group_->nccl().check(
      group_->library().update_handle(get(), topk.get(), &layout, stream_of(stream)),
      "ncclEpUpdateHandle");
}

void Handle::dispatch(const Tensor& x, const std::optional<Tensor>& w, const Tensor& rows,
                      const std::optional<Tensor>& row_w, std::uintptr_t stream) {
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
  group_->nccl().check(
      group_->library().dispatch(get(), &inputs, &outputs, nullptr, &config, stream_of(stream)),
      "ncclEpDispatch");
}

void Handle::combine(const Tensor& y, const std::optional<Tensor>& w, const Tensor& out,
                     const std::optional<Tensor>& home_w, std::uintptr_t stream) {
  Argument in(y, memory_), sum(out, memory_);
  std::optional<Argument> in_w, out_w;
  CombineInputs inputs;
  inputs.tokens = in.get();
  inputs.topk_weights = nccl_ep::get(emplace(in_w, w, memory_));
  CombineOutputs outputs;
  outputs.tokens = sum.get();
  outputs.topk_weights = nccl_ep::get(emplace(out_w, home_w, memory_));
  CombineConfig config;
  config.direction = w ? kBackward : kForward;
  group_->nccl().check(
      group_->library().combine(get(), &inputs, &outputs, &config, stream_of(stream)),
      "ncclEpCombine");
}

}  // namespace ncclep::nccl_ep
