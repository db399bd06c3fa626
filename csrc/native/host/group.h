// The native engine's object for one expert-parallel group: windows, state, and the calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/stream_order.h"
#include "common/tensor.h"
#include "native/device/rails.h"
#include "native/host/agreement.h"
#include "native/plan/plan.h"
#include "native/state.h"
#include "nccl/nccl.h"
#include "nccl/window.h"

namespace ncclep::native {

// Ranks of an NVLink domain for which there are kernels: those of more than a warp has lanes
// (wide/) are built for sm_100 and newer only, whose racks have such domains (setup.py).
#ifdef NCCLEP_WIDE_DOMAINS
constexpr int kBuiltLocalRanks = kMaxLocalRanks;
#else
constexpr int kBuiltLocalRanks = kWarpSize;
#endif

// Sizes of what this rank will receive, as counted on the device.
struct PlanSizes {
  std::int64_t num_rows, num_pairs, num_assignments;
  int first_bad_rank;  // the lowest whose routing is bad; -1: none
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

// A plan's memory, which Python allocates, and the sizes of its contents.
struct Plan {
  Tensor counts;        // int64 [2 * experts of this rank + 1]: padded, routed, number dropped
  Tensor token_routes;  // int32 [TokenRoutes::rows(...), T]
  int num_chunks;       // of the rank with the most tokens, or an upper bound
  int top_k;
  std::uint64_t number;  // the same on all ranks
  // Set by plan_receive.
  std::int64_t max_pairs = 0, max_assignments = 0;  // capacity of the routes
  Tensor routes;                                    // int32 [routes_size(...)]; the caller keeps it
  // The number of pairs and assignments where the host knows it, otherwise an upper bound.
  std::int64_t num_pairs = 0, num_assignments = 0;
  // Of the dispatched tensor; negative until it is known.
  std::int64_t num_rows = -1;
};

// The windows of a rank.
struct WindowSizes {
  Control control;  // what they are for
  std::size_t row_bytes;
  std::size_t control_bytes, rows_bytes;  // of the two windows
};
// For `control`'s group, and for batches of at most this many tokens of a rank.
WindowSizes window_sizes(Control control, int max_tokens, int top_k, std::size_t row_bytes);

// Of a plan's routes, in int32: the part for other domains, at the start, and all of them.
std::int64_t rail_routes_size(const Control& control, int num_chunks);
std::int64_t routes_size(const Control& control, std::int64_t max_pairs,
                         std::int64_t max_assignments, int num_chunks);

// The addresses of an open window's peers, as kernels take them.
template <int kGroups = 1>
DomainWindowsOf<kGroups> windows_of_domain(const Communicator& communicator, const Window& window);

// Construction, making windows and `close` are collective, and so is every call that queues work.
// An object that is not closed lives until the process ends.  With several NVLink domains the
// kernels use the network (docs/network.md).
class Group {
 public:
  Group(std::shared_ptr<Communicator> communicator, int num_experts, double timeout_s);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Makes windows this large, which also hold what the previous ones did, and has the ranks verify
  // them; does nothing if they are large enough.  Collective when they grow; waits for what the
  // communicator's groups have queued here before, and for no other work.
  //
  // Throws on all ranks or on none: UsageError when a CUDA graph holds calls of the group, or
  // `stream` is being captured; Error when a rank's earlier calls are not over after half of the
  // deadline, or when a rank has no memory or does not reach another's.  No windows are left after
  // an Error.
  void reserve(int max_tokens, int top_k, std::size_t row_bytes, std::uintptr_t stream,
               const AllGather& all_gather);
  // What grew when windows were last made, such as "tokens 0 -> 128".
  const std::string& growth() const { return growth_; }

  // Whether the windows are large enough.  The arguments of `fits` and `allocate` are equal on all
  // ranks.
  bool fits(int max_tokens, int top_k, std::size_t row_bytes) const;
  // The steps of `reserve`: the ranks agree after each that it succeeded on all of them, because an
  // error on one rank must not leave the others waiting in the next.
  //
  // Closes the current windows and allocates new ones.
  void allocate(int max_tokens, int top_k, std::size_t row_bytes);
  // Maps all ranks' memory; window_check.h verifies the addresses.
  void open();
  // Clears the windows for use; the last step.
  void clear();
  // Drops the windows after a step failed on any rank.  Windows that are open stay until the
  // process ends, because closing them is collective.  Not collective.
  void drop();
  // Collective.  Throws, and frees nothing, when earlier calls are not over after the longest
  // deadline that any of them had: then their kernels, which have not begun, use the windows yet.
  void close();
  // Waits at most `limit_s` seconds until what was queued for the communicator's windows is over,
  // and for no other work, unless a CUDA graph holds calls of the group: then for the device.
  // `what` names the reason in errors.
  void wait_for_calls(const char* what, double limit_s) const;
  // Before windows change: the other ranks, who wait for this one, hear of it within the deadline.
  void leave_windows() const;
  double longest_timeout() const { return longest_timeout_s_; }
  // Waits, when that is over, until nothing is on its way from or to other NVLink domains: then
  // windows may close.  Collective; does nothing within one domain.
  void settle();

  // The control and row windows; empty when there are none.
  std::vector<std::shared_ptr<Window>> windows() const;
  // Bytes of windows that this rank holds.
  std::size_t num_bytes() const;
  // Capacity of the windows: the arguments of `fits`.
  int max_tokens() const { return control_.max_tokens; }
  int num_experts() const { return control_.num_experts; }
  int max_top_k() const { return control_.max_top_k; }
  std::size_t row_bytes() const { return row_bytes_; }

  // Seconds for which kernels queued from now on wait for other ranks.
  double timeout() const { return timeout_s_; }
  void set_timeout(double seconds);
  // Whether a CUDA graph has captured any call, and so the windows of that time.
  bool was_captured() const { return was_captured_; }

  // Rows of a plan's token routes.
  int num_token_routes() const { return TokenRoutes::rows(control_); }
  // Number of int32 elements of a plan's routes.
  std::int64_t routes_size(std::int64_t max_pairs, std::int64_t max_assignments,
                           int num_chunks) const;

  // Queues a whole plan.  In static mode `max_recv_rows` is not 0; if there may be more rows than
  // that, the assignments that fit are written to `kept` first, int32 [T, K], and the rows that
  // ranks lacked so far to `lacked`, int64 [R] (plan/overflow.h).  Returns the ticket for
  // wait_for_sizes; 0 in static mode, where there is nothing to wait for.  If the plan has more
  // pairs or assignments than there is room for, `plan_receive` must follow.
  std::uint32_t plan(Plan& plan, const Tensor& topk_idx, int alignment, std::int64_t max_recv_rows,
                     const std::optional<Tensor>& kept, const std::optional<Tensor>& lacked,
                     std::int64_t max_pairs, std::int64_t max_assignments, const Tensor& routes,
                     int num_sms, std::uintptr_t stream);
  // Queues the plan's second kernel again, with more room.  `routes` replaces the plan's previous
  // routes.
  void plan_receive(Plan& plan, std::int64_t max_pairs, std::int64_t max_assignments,
                    const Tensor& routes, int num_sms, std::uintptr_t stream);
  // Waits on the host until the device has counted: without limit until the stream reaches the
  // plan, and from then on for at most twice the deadline.  Empty when a wait on the device failed
  // meanwhile.  `poll` is called now and then, and may throw.
  std::optional<PlanSizes> wait_for_sizes(Plan& plan, std::uint32_t ticket,
                                          const Tensor& rows_of_expert, std::uintptr_t stream,
                                          const std::function<void()>& poll) const;
  // Queues a copy to `out`, int64 [1], of the total nanoseconds for which earlier kernels waited
  // for other ranks to enter the same call.
  void copy_waited_ns(const Tensor& out, std::uintptr_t stream) const;
  // The ranks whose routing was bad in a static plan, one bit each in kMaxRanks / 32 words, as far
  // as the device has reported.  `forget` clears them; no work may be in flight then.
  void bad_ranks(bool forget, std::uint32_t* words);
  void dispatch(const Plan& plan, const Tensor& x, const std::optional<Tensor>& w,
                const Tensor& rows, const std::optional<Tensor>& row_w, int num_sms,
                std::uintptr_t stream);
  // `sums` is scratch: [sums_size(...), hidden]; not needed when that is 0.
  std::int64_t sums_size(const Plan& plan, int num_sms, int row_bytes) const;
  void combine(const Plan& plan, const Tensor& y, const std::optional<Tensor>& w,
               const std::optional<Tensor>& sums, const Tensor& out,
               const std::optional<Tensor>& topk_w, int num_sms, std::uintptr_t stream);

  // Queues a kernel that tells the other ranks that this one stops, which ends their waits; work
  // queued here from now on has no effect.  Not collective.  Does nothing without windows, where no
  // rank can be waiting.
  void refuse(Phase phase, std::uintptr_t stream);
  std::optional<Failure> failure() const;
  // Waits on the host until all work queued for the communicator's windows outside captures is
  // over.  `poll` is called now and then, and may throw.
  void wait_until_idle(const std::function<void()>& poll) const;

  // For operations that need no plan (low_latency/host.h).
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // Null within one NVLink domain.
  const std::shared_ptr<network::Rails>& network() const { return network_; }
  // The context of the kernels for domains of so many groups of ranks; `call` is packed by call.h.
  template <int kGroups = 1>
  KernelContextOf<kGroups> context(std::uint64_t call = 0) const;
  // Queues an operation with `launch`; see StreamOrder.  A graph must not run concurrently with
  // other work of the communicator's groups.
  void queue(std::uintptr_t stream, const std::function<void()>& launch);
  void check_num_ctas(int num_ctas) const;
  // The same for low-latency dispatches.
  void bad_low_latency(bool forget, std::uint32_t* words);

 private:
  // Calls use(context) with that of the kernels for this group.
  template <typename Use>
  void with_context(std::uint64_t call, Use&& use) const {
    if constexpr (kBuiltLocalRanks > kWarpSize) {
      if (control_.rank_groups() > 1) return use(context<kMaxRankGroups>(call));
    }
    use(context(call));
  }
  void allocate_state();
  // Whether a rank did not come, so that there is nobody to wait for.
  bool has_given_up() const;
  // Frees everything that was allocated; returns 0 or the first error, a cudaError_t.
  int free_state();
  void require_open() const;
  PlanScratch plan_scratch(int num_sms) const;
  void take_routes(Plan& plan, std::int64_t max_pairs, std::int64_t max_assignments,
                   const Tensor& routes) const;
  RailRoutes rail_routes(const Plan& plan) const;
  ReceivedRoutes received_routes(const Plan& plan) const;
  std::shared_ptr<Communicator> communicator_;
  Control control_;
  std::size_t row_bytes_ = 0;
  std::string growth_;
  double timeout_s_, longest_timeout_s_;
  std::uint32_t ticket_ = 0;  // of the last plan that the host waits for
  bool was_captured_ = false;
  std::shared_ptr<StreamOrder> order_;
  std::optional<Event> reached_;  // the stream has reached the last plan that the host waits for
  std::shared_ptr<Window> control_window_, rows_window_;
  std::shared_ptr<network::Rails> network_;  // with several domains
  std::shared_ptr<const Rails> rails_;       // while the windows are open
  State* state_ = nullptr;
  int max_sms_ = 0;  // all SMs of the GPU; `plan_scratch_` is sized for them
  std::int32_t* plan_scratch_ = nullptr;
  Mailbox* mailbox_ = nullptr;
  Mailbox* mailbox_on_device_ = nullptr;
};

}  // namespace ncclep::native
