// NVIDIA's libnccl_ep: its library, a group, and a handle of HT mode with expert-major rows.
//
// A group holds the staging memory for up to `max_tokens` tokens of `row_bytes` on each rank; a
// handle holds the routes of one micro-batch.  Handles keep their group alive, groups their
// communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/shared_library.h"
#include "common/tensor.h"
#include "nccl/nccl.h"
#include "nccl_ep/api.h"

namespace ncclep::nccl_ep {

class Library {
 public:
  // Opens libnccl_ep.so at `path`.  The process must have libnccl.so.2 open already, because the
  // library links to it by name.  Throws unless the interface of its version is known here.
  explicit Library(const std::string& path);

  const std::string& path() const { return library_.path(); }
  // 10000 * major + 100 * minor + patch.
  int version() const { return version_; }

  NcclResult (*create_group)(void**, NcclComm, const GroupConfig*);
  NcclResult (*destroy_group)(void*);
  NcclResult (*handle_mem_size)(void*, int, const HandleConfig*, std::size_t*, int);
  NcclResult (*init_handle)(void**, void*, int, const HandleConfig*, int, const TensorArgument*);
  NcclResult (*update_handle)(void*, const TensorArgument*, const LayoutInfo*, void*);
  NcclResult (*destroy_handle)(void*);
  NcclResult (*dispatch)(void*, const DispatchInputs*, const DispatchOutputs*, const LayoutInfo*,
                         const DispatchConfig*, void*);
  NcclResult (*combine)(void*, const CombineInputs*, const CombineOutputs*, const CombineConfig*,
                        void*);

 private:
  SharedLibrary library_;
  int version_ = 0;
};

struct GroupOptions {
  unsigned num_experts;    // of all ranks together
  unsigned max_tokens;     // of any rank
  unsigned max_recv_rows;  // static mode: rows of every dispatched tensor; 0: what is needed
  unsigned row_bytes;      // at most
  unsigned top_k;          // at most
  unsigned num_sms;        // 0: the library's own choice
  double timeout_s;        // deadline of its waits on the device; it traps when that passes
  bool low_latency;        // for `LowLatencyHandle`, which ignores max_recv_rows; not for `Handle`
};

// Construction and closing are collective.  An object that is not closed lives until the process
// ends.
class Group {
 public:
  Group(std::shared_ptr<Library> library, std::shared_ptr<Communicator> communicator,
        const GroupOptions& options);

  // Destroys the group; its handles cannot be used afterwards.  Idempotent.
  void close();
  // Bytes of device memory that a handle needs for its routes with `top_k` assignments of a token.
  std::size_t handle_bytes(std::size_t alignment, int top_k) const;

  const Library& library() const { return *library_; }
  const Nccl& nccl() const { return communicator_->nccl(); }
  void* get() const;
  bool is_closed() const { return group_ == nullptr; }
  const GroupOptions& options() const { return options_; }
  int num_ranks() const { return communicator_->num_ranks(); }

 private:
  std::shared_ptr<Library> library_;
  std::shared_ptr<Communicator> communicator_;
  GroupOptions options_;
  void* group_ = nullptr;
};

// Keeps the library's handle of `group`, and the group alive.
class HandleOwner {
 public:
  ~HandleOwner();
  HandleOwner(const HandleOwner&) = delete;
  HandleOwner& operator=(const HandleOwner&) = delete;

  void close();

 protected:
  HandleOwner(std::shared_ptr<Group> group, int top_k) : group_(std::move(group)), top_k_(top_k) {}
  // Makes the handle that the group's mode and `layout` need.
  void init(int layout, const HandleConfig* config, const TensorArgument* memory);
  // The handle, which must not be closed.
  void* get() const;
  void update(const TensorArgument* topk_idx, const LayoutInfo* layout, std::uintptr_t stream);
  void dispatch(const DispatchInputs& inputs, const DispatchOutputs& outputs,
                const LayoutInfo* layout, const DispatchConfig& config, std::uintptr_t stream);
  void combine(const CombineInputs& inputs, const CombineOutputs& outputs,
               const CombineConfig& config, std::uintptr_t stream);

  std::shared_ptr<Group> group_;
  int top_k_;

 private:
  void* handle_ = nullptr;
};

// The routes of one micro-batch.  `stream` is a cudaStream_t; update, dispatch and combine are
// collective and return when their work is queued there (dispatch with exact sizes waits for
// `update` to be done).
class Handle : public HandleOwner {
 public:
  // `memory`: uint8 [at least group.handle_bytes(alignment, top_k)], kept alive by the caller.
  Handle(std::shared_ptr<Group> group, std::size_t alignment, int top_k, const Tensor& memory);

  // topk_idx [T, K] int32 or int64, -1 for an assignment that goes nowhere; expert_counts [experts
  // of this rank] and num_rows [1] int64 are written: padded rows of each local expert and their
  // sum.
  void update(const Tensor& topk_idx, const Tensor& expert_counts, const Tensor& num_rows,
              std::uintptr_t stream);
  // x [T, H] -> rows [N, H]; with w [T, K] and row_w [N] (fp32) in the forward direction, without
  // both in the backward direction, which moves the same rows.
  void dispatch(const Tensor& x, const std::optional<Tensor>& w, const Tensor& rows,
                const std::optional<Tensor>& row_w, std::uintptr_t stream);
  // y [N, H] -> out [T, H]; with w [N] and topk_w [T, K] (fp32) in the backward direction.
  void combine(const Tensor& y, const std::optional<Tensor>& w, const Tensor& out,
               const std::optional<Tensor>& topk_w, std::uintptr_t stream);

 private:
  void* memory_;  // stands in for the address of an empty tensor, which has none
};

}  // namespace ncclep::nccl_ep
