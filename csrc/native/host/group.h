// What the native engine holds for one expert-parallel group: windows, state, and the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/stream_order.h"
#include "common/tensor.h"
#include "native/plan/plan.h"
#include "native/state.h"
#include "nccl/nccl.h"
#include "nccl/window.h"

namespace ncclep::native {

// What a rank will receive, as the device told the host.
struct PlanSizes {
  std::int64_t num_rows, num_pairs, num_assignments;
  std::uint32_t bad_ranks;
};

// Why the group has failed on this rank; see Mailbox.
struct Failure {
  Reason reason;
  Phase phase;
  int peer;
  std::uint64_t epoch;
  double deadline_s;
  std::uint64_t own_call, peer_call;  // call.h; 0: unknown
};

// A plan's memory, as Python allocated it, and what is in it.
struct Plan {
  Tensor counts;        // int64 [2 * experts of this rank + 1]: padded, routed, number dropped
  Tensor token_routes;  // int32 [4, T]
  int num_chunks;       // of the rank with the most tokens, or of more
  int top_k;
  std::uint64_t number;  // the same on all ranks
  // What plan_receive adds.
  std::int64_t max_pairs = 0, max_assignments = 0;  // that the routes have room for
  Tensor routes;                                    // int32 [routes_size(...)]; the caller keeps it
  // Pairs and assignments that there are, where the host knows, and otherwise the most there can
  // be.
  std::int64_t num_pairs = 0, num_assignments = 0;
  // Of the dispatched tensor; negative as long as nobody has said.
  std::int64_t num_rows = -1;
};

// Making it, making windows and `close` are collective, and so is every call that queues work.  An
// object that nobody closes is left to the end of the process.
class Group {
 public:
  Group(std::shared_ptr<Communicator> communicator, int num_experts, double timeout_s);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Whether the windows hold this much.  The arguments of `fits` and `allocate` are equal on all
  // ranks.
  bool fits(int max_tokens, int top_k, std::size_t row_bytes) const;
  // Windows that do, and that hold what the ones before did, are made in three steps, so that the
  // ranks can agree after each that it went well on all of them: an error on one rank must not
  // leave the others waiting in the next.  Nothing may be under way on any rank.
  //
  // Closes the windows there are and allocates the new ones.
  void allocate(int max_tokens, int top_k, std::size_t row_bytes);
  // Maps all ranks' memory.  The caller verifies the addresses.
  void open();
  // Makes the windows fit for use; the last step.
  void clear();
  // After a step that failed on any rank: no windows.  Those that are open stay to the end of the
  // process, because closing them is collective.  Not collective.
  void drop();
  void close();

  // Control, rows; empty when there are none.
  std::vector<std::shared_ptr<Window>> windows() const;
  // How often windows were allocated.
  int generation() const { return generation_; }
  // Bytes of windows that this rank holds.
  std::size_t num_bytes() const;
  // What the windows hold: the arguments of `fits`.
  int max_tokens() const { return control_.max_tokens; }
  int max_top_k() const { return control_.max_top_k; }
  std::size_t row_bytes() const { return row_bytes_; }

  // Seconds that the kernels queued from now on wait for other ranks.
  double timeout() const { return timeout_s_; }
  void set_timeout(double seconds);
  // Whether a CUDA graph has captured any call, and so the windows that there were.
  bool was_captured() const { return was_captured_; }

  // int32 of a plan's routes.
  std::int64_t routes_size(std::int64_t max_pairs, std::int64_t max_assignments,
                           int num_chunks) const;

  // Queues a whole plan.  In static mode `max_recv_rows` is not 0; if there may be more than that,
  // what fits is written to `kept` first, int32 [T, K], and what ranks lacked so far to `lacked`,
  // int64 [R] (plan/overflow.h).  Returns what wait_for_sizes takes; in static mode there is
  // nothing to wait for.  If the plan has more pairs or assignments than there is room for,
  // `plan_receive` has to follow.
  std::uint32_t plan(Plan& plan, const Tensor& topk_idx, int alignment, std::int64_t max_recv_rows,
                     const std::optional<Tensor>& kept, const std::optional<Tensor>& lacked,
                     std::int64_t max_pairs, std::int64_t max_assignments, const Tensor& routes,
                     int num_sms, std::uintptr_t stream);
  // Queues its end once more, with more room.  `routes` belongs to the plan from now on, in place
  // of those that it had.
  void plan_receive(Plan& plan, std::int64_t max_pairs, std::int64_t max_assignments,
                    const Tensor& routes, int num_sms, std::uintptr_t stream);
  // Waits on the host until the device has counted, as long as it takes the stream to come to the
  // plan, and then for at most twice the deadline.  Empty when a wait on the device failed
  // meanwhile.  `poll` is called now and then, and may throw.
  std::optional<PlanSizes> wait_for_sizes(Plan& plan, std::uint32_t ticket,
                                          const Tensor& rows_of_expert, std::uintptr_t stream,
                                          const std::function<void()>& poll) const;
  // Queues writing down, int64 [1], for how many nanoseconds the kernels before have waited for
  // other ranks to enter the same call, in all.
  void copy_waited_ns(const Tensor& out, std::uintptr_t stream) const;
  // Whose routing was bad in a static plan, one bit each, as far as the device has come; forgets it
  // if told so, when nothing may be under way.
  std::uint32_t bad_ranks(bool forget);
  void dispatch(const Plan& plan, const Tensor& x, const std::optional<Tensor>& w,
                const Tensor& rows, const std::optional<Tensor>& row_w, int num_sms,
                std::uintptr_t stream);
  // `sums` is scratch: [sums_size(...), hidden]; not needed when that is 0.
  std::int64_t sums_size(const Plan& plan, int num_sms, int row_bytes) const;
  void combine(const Plan& plan, const Tensor& y, const std::optional<Tensor>& w,
               const std::optional<Tensor>& sums, const Tensor& out,
               const std::optional<Tensor>& topk_w, int num_sms, std::uintptr_t stream);

  // Queues telling the other ranks that this one goes no further, whose waits end then; nothing
  // that is queued from now on does anything here.  Not collective.  Without windows nobody waits.
  void refuse(Phase phase, std::uintptr_t stream);
  std::optional<Failure> failure() const;
  // Waits on the host until all that was queued for windows of the communicator, and not captured,
  // is over.  `poll` is called now and then, and may throw.
  void wait_until_idle(const std::function<void()>& poll) const;

  // For operations beside plans (low_latency/host.h).
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // What kernels get; `call` is that of call.h.
  KernelContext context(std::uint64_t call = 0) const;
  // Queues an operation with `launch`; see StreamOrder.  A graph must not run beside other work of
  // the communicator's groups.
  void queue(std::uintptr_t stream, const std::function<void()>& launch);
  void check_num_ctas(int num_ctas) const;
  // Whose routing was bad in a low-latency dispatch, one bit each, as far as the device has come;
  // `forget` as in bad_ranks.
  std::uint32_t bad_low_latency(bool forget);

 private:
  void allocate_state();
  // All of it that there is; returns 0 or the first error, a cudaError_t.
  int free_state();
  void require_open() const;
  PlanScratch plan_scratch(int num_sms) const;
  void take_routes(Plan& plan, std::int64_t max_pairs, std::int64_t max_assignments,
                   const Tensor& routes) const;
  std::shared_ptr<Communicator> communicator_;
  Control control_;
  std::size_t row_bytes_ = 0;
  double timeout_s_;
  std::uint32_t ticket_ = 0;  // of the last plan that the host waits for
  bool was_captured_ = false;
  std::shared_ptr<StreamOrder> order_;
  std::optional<Event> reached_;  // the stream has come to the last plan that the host waits for
  std::shared_ptr<Window> control_window_, rows_window_;
  int generation_ = 0;
  State* state_ = nullptr;
  int max_sms_ = 0;  // that `plan_scratch_` is for: all of the GPU's
  std::int32_t* plan_scratch_ = nullptr;
  Mailbox* mailbox_ = nullptr;
  Mailbox* mailbox_on_device_ = nullptr;
};

}  // namespace ncclep::native
