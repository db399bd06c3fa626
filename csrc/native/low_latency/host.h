// What a rank holds for low-latency calls (protocol.h): a window, state, and the calls.
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
  DType payload, dtype;  // of dispatched rows, of what is combined
  int num_scales;        // fp32, of each dispatched row
};

// Made by all ranks of a group that has windows, with the same sizes, in three steps as the group's
// own windows are: the constructor allocates, `open` is collective, `clear` makes it fit for use.
// An object that nobody closes is left to the end of the process.
//
// The caller sees to it that dispatch, combine and their halves take turns (LowLatency in
// engines/low_latency.py), and the device refuses to send out of turn.  Out of turn, results are
// undefined, but no memory is touched that is not the object's or an argument.
class LowLatency {
 public:
  // `generation` tells its window apart from others there were.  Not collective.
  LowLatency(std::shared_ptr<Group> group, const LowLatencySizes& sizes, int generation);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  void open();
  void clear();
  // After a step that failed on any rank: see Group::drop.
  void drop();
  // Collective.
  void close();

  std::vector<std::shared_ptr<Window>> windows() const;
  int generation() const { return generation_; }
  std::size_t num_bytes() const { return window_ ? window_->num_bytes() : 0; }

  // Where in this rank's memory is what the last dispatch brought; see LowLatencyWindow.
  std::uintptr_t rows() const { return address(layout_.rows()); }
  std::uintptr_t scales() const { return address(layout_.scales()); }
  std::uintptr_t experts() const { return address(layout_.experts()); }
  std::uintptr_t weights() const { return address(layout_.weights()); }

  // Queues a dispatch, or its first half.  What it is given stays until the second half is over.
  void dispatch(const Tensor& x, const std::optional<Tensor>& scales, const Tensor& topk_idx,
                const Tensor& weights, const Tensor& counts, bool completes, int num_ctas,
                std::uintptr_t stream);
  void complete_dispatch(const Tensor& counts, std::uintptr_t stream);
  // Queues a combine, its first half, or its second one with the same arguments.
  void combine(const Tensor& y, const std::optional<Tensor>& rows_of, const Tensor& out, bool sends,
               bool completes, int num_ctas, std::uintptr_t stream);

 private:
  std::uintptr_t address(std::size_t offset) const;
  LowLatencyContext context() const;
  void require_open() const;

  std::shared_ptr<Group> group_;
  LowLatencySizes sizes_;
  LowLatencyWindow layout_;
  int generation_;
  std::shared_ptr<Window> window_;
  LowLatencyState* state_ = nullptr;
  std::int64_t num_tokens_ = 0;  // of the last dispatch
};

}  // namespace ncclep::native
