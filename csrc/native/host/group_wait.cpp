// How the host reads the group's progress on the device, with and without waiting.
#include <cuda_runtime.h>

#include <atomic>

#include "common/cuda.h"
#include "common/pause.h"
#include "native/host/group.h"
#include "nccl/run_with_deadline.h"

namespace ncclep::native {

namespace {

// How often a waiting host queries the stream's status, in seconds.
constexpr double kQueryInterval = 1e-3;

// Without `bits` there are none.
void read(RankBits* bits, bool forget, std::uint32_t* words) {
  for (int i = 0; i < kRankWords; ++i) {
    words[i] = bits == nullptr ? 0 : bits->words[i];
    if (forget && bits != nullptr) bits->words[i] = 0;
  }
}

}  // namespace

std::optional<ncclepPlanSizes_t> Group::wait_for_sizes(Plan& plan,
                                                       const ncclepTensor_t* rows_of_expert,
                                                       std::uintptr_t stream,
                                                       const std::function<void()>& poll) const {
  const int num_local = control_.num_local();
  const std::uint32_t ticket = plan.ticket;
  const Tensor given = tensor_at(rows_of_expert, "rows_of_expert");
  require_open();
  require(ticket != 0 && ticket == ticket_, "ticket ", ticket, " is not that of the last plan");
  require(given.dtype == ncclepInt64 && given.num_elements() == num_local,
          "rows_of_expert must be int64 [", num_local, "] on the CPU");
  auto* rows = static_cast<std::int64_t*>(given.data);
  ncclepPlanSizes_t sizes = NCCLEP_PLAN_SIZES_INIT;
  const auto is_reported = [&] {
    std::uint64_t words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = mailbox_->sizes[i];
      if (words[i] >> 32 != ticket) return false;
      words[i] &= 0xffffffffu;
    }
    for (int local = 0; local < num_local; ++local) {
      const std::uint64_t word = mailbox_->rows_of_expert[local];
      if (word >> 32 != ticket) return false;
      rows[local] = static_cast<std::int64_t>(word & 0xffffffffu);
    }
    sizes.num_rows = static_cast<std::int64_t>(words[0]);
    sizes.num_pairs = static_cast<std::int64_t>(words[1]);
    sizes.num_assignments = static_cast<std::int64_t>(words[2]);
    sizes.first_bad_rank = static_cast<int>(words[3]) - 1;
    sizes.has_room =
        sizes.num_pairs <= plan.max_pairs && sizes.num_assignments <= plan.max_assignments;
    return true;
  };
  const auto has_failed = [&] { return mailbox_->failed_phase != 0; };
  // Work queued before the plan, such as a receive from a pipeline stage that compiles, may take
  // any time without any rank of this group being late.  Once the stream reaches the plan, the
  // device has its own deadline and knows which rank was late, so this one is longer: it is for a
  // kernel that cannot start.
  const double limit = 2 * timeout_s_;
  std::optional<Clock::time_point> reached;
  const auto is_over = [&](double) {
    const auto start = Clock::now();
    do {
      for (int turn = 0; turn < 1024; ++turn) {
        if (is_reported()) return true;
      }
      if (has_failed()) return true;
    } while (seconds_since(start) < kQueryInterval);
    // A fault of any earlier kernel shows up here; the mailbox would never report it.
    const cudaError_t status = cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream));
    if (status != cudaErrorNotReady) {
      cuda_check(status, "waiting for a plan's rows");
      ensure(is_reported() || has_failed(), "the device finished a plan without counting its rows");
      return true;
    }
    if (!reached && reached_->is_over()) reached = Clock::now();
    ensure(!reached || seconds_since(*reached) <= limit,
           "the device did not count the rows of a plan within ", limit,
           " s after its stream reached it: other work keeps its kernel from the GPU's SMs");
    return false;
  };
  wait_until(is_over, poll);
  if (!is_reported()) return std::nullopt;
  plan.num_pairs = sizes.num_pairs;
  plan.num_assignments = sizes.num_assignments;
  if (sizes.first_bad_rank < 0) plan.num_rows = sizes.num_rows;
  return sizes;
}

void Group::wait_until_idle(const std::function<void()>& poll) const {
  if (order_ == nullptr) return;
  wait_until([&](double) { return order_->is_idle(); }, poll);
}

void Group::wait_for_calls(const char* what, double limit_s) const {
  const std::string late =
      join_text(what, ": its earlier calls were not over on the device within ", limit_s,
                " s: they wait for another rank, or for other work on the GPU");
  if (was_captured_) {  // no event tells when replays are over
    const auto wait = [] { cuda_check(cudaDeviceSynchronize(), "waiting for the device"); };
    return run_with_deadline(wait, late, communicator_->device(), limit_s, [] {});
  }
  const auto is_over = [&](double waited) {
    if (order_->is_idle()) return true;
    if (waited > limit_s) throw PeerError(late);
    return false;
  };
  wait_until(is_over, [] {});
}

void Group::leave_windows() const { wait_for_calls("leaving its windows", timeout_s_ / 2); }

ncclepFailure_t Group::failure() const {
  ncclepFailure_t found = NCCLEP_FAILURE_INIT;
  if (mailbox_ == nullptr || mailbox_->failed_phase == 0) return found;
  std::atomic_thread_fence(std::memory_order_acquire);
  found.reason = static_cast<ncclepReason_t>(mailbox_->failed_reason);
  found.phase = static_cast<ncclepPhase_t>(mailbox_->failed_phase);
  found.peer = mailbox_->failed_peer;
  found.operation = mailbox_->failed_epoch;
  found.deadline_s = static_cast<double>(mailbox_->failed_deadline_ns) * 1e-9;
  found.own_call = mailbox_->failed_calls[0];
  found.peer_call = mailbox_->failed_calls[1];
  if (found.reason == ncclepReasonLate && found.peer_call != 0) {
    // A kernel that compares no calls waits for no entry: what the peer has entered is another one.
    if (found.own_call == 0) found.peer_call = 0;
    // Its data is awaited where its call is compared, and may be missed first.
    if (found.own_call != found.peer_call) found.reason = ncclepReasonDiffers;
  }
  return found;
}

void Group::bad_ranks(bool forget, std::uint32_t* words) {
  read(mailbox_ == nullptr ? nullptr : &mailbox_->bad_ranks, forget, words);
}

void Group::bad_low_latency(bool forget, std::uint32_t* words) {
  read(mailbox_ == nullptr ? nullptr : &mailbox_->bad_low_latency, forget, words);
}

void Group::copy_waited_ns(const ncclepTensor_t* given, std::uintptr_t stream) const {
  const Tensor out = tensor_at(given, "out");
  require(out.dtype == ncclepInt64 && out.num_elements() == 1,
          "out: must be int64 and have one element");
  auto* const on = reinterpret_cast<cudaStream_t>(stream);
  if (state_ == nullptr) {  // no windows yet: no kernel has waited
    cuda_check(cudaMemsetAsync(out.data, 0, sizeof(std::int64_t), on), "cudaMemsetAsync");
    return;
  }
  cuda_check(cudaMemcpyAsync(out.data, &state_->waited_ns, sizeof(std::int64_t),
                             cudaMemcpyDeviceToDevice, on),
             "cudaMemcpyAsync");
}

}  // namespace ncclep::native
