// What the native engine holds for one expert-parallel group: windows, state, and the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "common/tensor.h"
#include "native/state.h"
#include "nccl/nccl.h"
#include "nccl/window.h"

namespace ncclep::native {

// What a rank will receive, as the device told the host.
struct PlanSizes {
  std::int64_t num_rows, num_pairs, num_picks, num_dropped;
  std::uint32_t bad_ranks;
};

// A wait on the device whose deadline passed.
struct Failure {
  std::uint32_t phase;  // a Phase; kNone: there was none
  int peer;
  std::uint64_t epoch;
};

// A plan's memory, as Python allocated it, and what is in it.
struct Plan {
  Tensor counts;  // int64 [2 * experts of this rank + 1]: padded, routed, number dropped
  Tensor home;    // int32 [4, T]
  Tensor routes;  // int32 [routes_size(...)]
  std::int64_t num_pairs, num_picks;  // received
  int num_chunks;                     // of the rank with the most tokens
  int top_k;
};

// Making it, `reserve` and `close` are collective, and so is every call that queues work.  An
// object that nobody closes is left to the end of the process.
class Group {
 public:
  Group(std::shared_ptr<Communicator> communicator, int num_experts, double timeout_s);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Whether the windows hold this much.  The arguments of `fits` and `reserve` are equal on all
  // ranks.
  bool fits(int max_tokens, int top_k, std::size_t row_bytes) const;
  // Makes windows that do, and that hold what the ones before did; nothing may be under way on any
  // rank.
  void reserve(int max_tokens, int top_k, std::size_t row_bytes);
  void close();
  // Bytes of windows that this rank holds.
  std::size_t num_bytes() const;

  // Rows of `scratch` that plan_count needs, and int32 of a plan's routes.
  std::int64_t scratch_size() const;
  std::int64_t routes_size(std::int64_t num_pairs, std::int64_t num_picks, int num_chunks) const;

  // Queues the first part of plan; returns the number of the plan.
  std::uint64_t plan_count(const Tensor& topk_idx, int alignment, const Tensor& counts,
                           const Tensor& home, const Tensor& scratch, int num_sms,
                           std::uintptr_t stream);
  // Waits on the host, not for the stream's other work, until the device has counted.
  PlanSizes wait_for_sizes(std::uint64_t plan) const;
  void plan_receive(const Plan& plan, int num_sms, std::uintptr_t stream);
  void dispatch(const Plan& plan, const Tensor& x, const std::optional<Tensor>& w,
                const Tensor& rows, const std::optional<Tensor>& row_w, int num_sms,
                std::uintptr_t stream);
  void combine(const Plan& plan, const Tensor& y, const std::optional<Tensor>& w, const Tensor& out,
               const std::optional<Tensor>& home_w, int num_sms, std::uintptr_t stream);

  Failure failure() const;

 private:
  Rank rank() const;
  // Operations of a group run one after the other, whatever streams they are queued on.
  void queue_after_the_last(std::uintptr_t stream);

  std::shared_ptr<Communicator> communicator_;
  Control control_;
  std::size_t row_bytes_ = 0;
  double timeout_s_;
  std::uint64_t plans_ = 0;
  std::optional<std::uintptr_t> last_stream_;
  void* last_done_ = nullptr;  // cudaEvent_t
  std::unique_ptr<Window> control_window_, rows_window_;
  State* state_ = nullptr;
  Mailbox* mailbox_ = nullptr;
  Mailbox* mailbox_on_device_ = nullptr;
};

}  // namespace ncclep::native
