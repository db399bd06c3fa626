// A rank's object for low-latency calls (protocol.h): a window, state, and the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/tensor.h"
#include "native/host/group.h"
#include "native/low_latency/protocol.h"
#include "nccl/window.h"

namespace ncclep::native {

// A rank's window for objects of these sizes.
LowLatencyWindow low_latency_window(int num_ranks, int num_domains,
                                    const ncclepLowLatencyConfig_t& sizes);

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
                                          const ncclepLowLatencyConfig_t& sizes,
                                          const AllGather& all_gather);

  // Only allocates.  Not collective.
  LowLatency(std::shared_ptr<Group> group, const ncclepLowLatencyConfig_t& sizes);
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

  // What the last dispatch delivered, in this rank's memory.
  ncclepLowLatencyBuffers_t buffers() const;

  // Queue a dispatch or a combine, or half of one; the arguments of the first half must stay alive
  // until the second is over.
  void dispatch(const ncclepLowLatencyDispatch_t& given);
  void combine(const ncclepLowLatencyCombine_t& given);

 private:
  LowLatencyContext context() const;
  void require_open() const;

  std::shared_ptr<Group> group_;
  ncclepLowLatencyConfig_t sizes_;
  LowLatencyWindow layout_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<const Rails> rails_;  // with several domains
  LowLatencyState* state_ = nullptr;
  std::int64_t num_tokens_ = 0;  // of the last dispatch
};

}  // namespace ncclep::native
