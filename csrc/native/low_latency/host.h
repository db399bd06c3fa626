// A rank's object for low-latency calls (protocol.h): a window, state, and the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/dtype.h"
#include "common/tensor.h"
#include "native/host/group.h"
#include "native/low_latency/protocol.h"
#include "nccl/window.h"

namespace ncclep::native {

struct LowLatencySizes {
  int max_tokens, hidden, top_k;
  DType payload, dtype;  // dtypes of dispatched and of combined rows
  int num_scales;        // fp32 scales of each dispatched row
};

// A rank's window for objects of these sizes.
LowLatencyWindow low_latency_window(int num_ranks, int num_domains, const LowLatencySizes& sizes);

// Made by all ranks of a group with the same sizes, in steps like the group's own windows: the
// constructor allocates, `open` is collective, `clear` prepares it for use.  An object that is not
// closed lives until the process ends.
//
// The caller ensures that dispatch, combine and their halves alternate (LowLatency in
// engines/low_latency.py), and the device refuses to send out of turn.  Results of calls out of
// turn are undefined, but they touch no memory other than the object's and the arguments'.
class LowLatency {
 public:
  // An object whose window is open and verified; the group gets windows if it has none, for its
  // control window tells ranks that another one stops.  Collective.  Throws on all ranks or on
  // none.
  static std::shared_ptr<LowLatency> make(std::shared_ptr<Group> group,
                                          const LowLatencySizes& sizes,
                                          const AllGather& all_gather);

  // Only allocates.  Not collective.
  LowLatency(std::shared_ptr<Group> group, const LowLatencySizes& sizes);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  void open();
  void clear();
  // After a step that failed on any rank: see Group::discard_windows.
  void discard_windows();
  // Collective.
  void close();

  std::vector<std::shared_ptr<Window>> windows() const;
  std::size_t num_bytes() const { return window_ ? window_->num_bytes() : 0; }

  // Addresses in this rank's memory of what the last dispatch delivered; see LowLatencyWindow.
  std::uintptr_t rows() const { return address(layout_.rows()); }
  std::uintptr_t scales() const { return address(layout_.scales()); }
  std::uintptr_t experts() const { return address(layout_.experts()); }
  std::uintptr_t weights() const { return address(layout_.weights()); }

  // Queues a dispatch, or its first half.  The arguments must stay alive until the second half is
  // over.
  void dispatch(const Tensor& x, const std::optional<Tensor>& scales, const Tensor& topk_idx,
                const Tensor& weights, const Tensor& counts, bool completes, int num_ctas,
                std::uintptr_t stream);
  void complete_dispatch(const Tensor& counts, std::uintptr_t stream);
  // Queues a combine, its first half, or, with the same arguments, its second half.
  void combine(const Tensor& y, const std::optional<Tensor>& rows_of, const Tensor& out, bool sends,
               bool completes, int num_ctas, std::uintptr_t stream);

 private:
  std::uintptr_t address(std::size_t offset) const;
  LowLatencyContext context() const;
  void queue_dispatch(const LowLatencyDispatch& job, int num_ctas, std::uintptr_t stream);
  void require_open() const;

  std::shared_ptr<Group> group_;
  LowLatencySizes sizes_;
  LowLatencyWindow layout_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<const Rails> rails_;  // with several domains
  LowLatencyState* state_ = nullptr;
  std::int64_t num_tokens_ = 0;  // of the last dispatch
};

}  // namespace ncclep::native
