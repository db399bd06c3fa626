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

// A plan's memory, which the caller allocates, and the sizes of its contents.
struct Plan {
  Tensor counts;         // see ncclepPlanConfig_t
  Tensor token_routes;   // likewise
  int num_chunks;        // of the rank with the most tokens, or an upper bound
  int top_k;             // K
  std::uint64_t number;  // the same on all ranks
  // For `wait_for_sizes`; 0 in static mode, where there is nothing to wait for.
  std::uint32_t ticket = 0;
  // Set by plan_receive.
  std::int64_t max_pairs = 0, max_assignments = 0;  // capacity of the routes
  Tensor routes;                                    // int32 [routes_size(...)]; the caller keeps it
  // The number of pairs and assignments where the host knows it, otherwise an upper bound.
  std::int64_t num_pairs = 0, num_assignments = 0;
  // Of the dispatched tensor; negative until it is known.
  std::int64_t num_rows = -1;
  bool leaves_unused = true;  // see ncclepPlanConfig_t; in exact mode no row is unused
};

// The windows of a rank.
struct WindowSizes {
  Control control;  // what they are for
  std::size_t row_bytes;
  std::size_t control_bytes, rows_bytes;  // of the two windows
};
// For `control`'s group, and for batches of at most this shape.
WindowSizes window_sizes(Control control, const ncclepShape_t& shape);

// Elements of a plan's routes; `most_tokens` is of the rank with the most.
std::int64_t routes_size(const Control& control, std::int64_t max_pairs,
                         std::int64_t max_assignments, int most_tokens);

// The addresses of an open window's peers, as kernels take them.
template <int kGroups = 1>
DomainWindowsOf<kGroups> windows_of_domain(const Communicator& communicator, const Window& window);

// What include/ncclep.h says of ncclepGroup_t, with that interface's structs; Python's bindings and
// the functions of the C interface call it.
//
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
  void reserve(const ncclepShape_t& shape, std::uintptr_t stream, const AllGather& all_gather);
  // Whether the windows are large enough.  The arguments of `fits` and `allocate` are equal on all
  // ranks.
  bool fits(const ncclepShape_t& shape) const;
  // The steps of `reserve`: the ranks agree after each that it succeeded on all of them, because an
  // error on one rank must not leave the others waiting in the next.
  //
  // Closes the current windows and allocates new ones.
  void allocate(const ncclepShape_t& shape);
  // Maps all ranks' memory; window_check.h verifies the addresses.
  void open();
  // Clears the windows for use; the last step.
  void clear();
  // Forgets the windows after a step failed on any rank.  Windows that are open stay until the
  // process ends, because closing them is collective.  Not collective.
  void discard_windows();
  // Closes the windows; `reserve` makes new ones, and plans stay valid.  No CUDA graph that holds
  // calls of the group may be replayed any more.  Collective.  Throws, and frees nothing, when
  // earlier calls are not over after the longest deadline that any of them had: then their kernels,
  // which have not begun, use the windows yet.
  void release_windows();
  // Collective, and throws as `release_windows` does.
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
  void drain_network();

  // The control and row windows; empty when there are none.
  std::vector<std::shared_ptr<Window>> windows() const;
  // Bytes of windows that this rank holds.
  std::size_t num_bytes() const;
  ncclepGroupInfo_t info() const;

  // Seconds for which kernels queued from now on wait for other ranks.
  double timeout() const { return timeout_s_; }
  void set_timeout(double seconds);

  std::int64_t routes_size(std::int64_t max_pairs, std::int64_t max_assignments,
                           int most_tokens) const {
    return native::routes_size(control_, max_pairs, max_assignments, most_tokens);
  }
  // Queues a whole plan.  If it has more pairs or assignments than there is room for,
  // `plan_receive` must follow: it queues the plan's second kernel again, with more room.
  Plan plan(const ncclepPlanConfig_t& config);
  void plan_receive(Plan& plan, const ncclepTensor_t* routes, std::int64_t max_pairs,
                    std::int64_t max_assignments, int num_sms, std::uintptr_t stream);
  // Waits on the host until the device has counted: without limit until the stream reaches the
  // plan, and from then on for at most twice the deadline.  Empty when a wait on the device failed
  // meanwhile.  `poll` is called now and then, and may throw.
  std::optional<ncclepPlanSizes_t> wait_for_sizes(Plan& plan, const ncclepTensor_t* rows_of_expert,
                                                  std::uintptr_t stream,
                                                  const std::function<void()>& poll) const;
  void copy_waited_ns(const ncclepTensor_t* out, std::uintptr_t stream) const;
  void dispatch(const Plan& plan, const ncclepRows_t& given);
  // Rows of scratch that a combine needs, whether or not there are windows for it.
  std::int64_t sums_size(const Plan& plan, int num_sms, int row_bytes) const;
  void combine(const Plan& plan, const ncclepRows_t& given);

  // Queues a kernel that tells the other ranks that this one stops, which ends their waits; work
  // queued here from now on has no effect.  Not collective.  Does nothing without windows, where no
  // rank can be waiting.
  void refuse(Phase phase, std::uintptr_t stream);
  ncclepFailure_t failure() const;
  // The ranks whose routing was bad in a static plan, and in a low-latency dispatch, one bit each
  // in kMaxRanks / 32 words.  `forget` clears them.
  void bad_ranks(bool forget, std::uint32_t* words);
  void bad_low_latency(bool forget, std::uint32_t* words);
  // Waits on the host until all work queued for the communicator's windows outside captures is
  // over.  `poll` is called now and then, and may throw.
  void wait_until_idle(const std::function<void()>& poll) const;

  // For operations that need no plan (low_latency/host.h).
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // Null within one NVLink domain.
  const std::shared_ptr<network::Rails>& network() const { return network_; }
  // The context of the kernels for domains of so many groups of ranks; `call` is packed by
  // call_signature.h.
  template <int kGroups = 1>
  KernelContextOf<kGroups> context(std::uint64_t call = 0) const;
  // For what queues an operation.  A graph must not run concurrently with other work of the
  // communicator's groups.
  StreamOrder::Turn take_turn(std::uintptr_t stream);
  void check_num_ctas(int num_ctas) const;

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
  // The tensors of a dispatch or combine, checked.
  struct Rows {
    Tensor tokens, rows;
    std::optional<Tensor> topk_w, row_w;
    std::uintptr_t stream;
  };
  Rows rows_at(Phase phase, const Plan& plan, const ncclepRows_t& given) const;
  PlanScratch plan_scratch(int num_sms) const;
  void take_routes(Plan& plan, const ncclepTensor_t* routes, std::int64_t max_pairs,
                   std::int64_t max_assignments) const;
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
