// What the host learns of a group from its device: it waits for it, or looks how far it has come.
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "common/cuda.h"
#include "native/group.h"

namespace ncclep::native {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Something that a host which waits does at times, in seconds from the start of its wait.
class Every {
 public:
  explicit Every(double interval) : interval_(interval), next_(interval) {}
  bool is_due(double waited) {
    if (waited < next_) return false;
    next_ = waited + interval_;
    return true;
  }

 private:
  double interval_, next_;
};

// How often a host that waits asks the driver how the stream is getting on, and calls `poll`.
constexpr double kQueryInterval = 1e-3, kPollInterval = 0.05;

}  // namespace

std::optional<PlanSizes> Group::wait_for_sizes(Plan& plan, std::uint32_t ticket,
                                               const Tensor& rows_of_expert, std::uintptr_t stream,
                                               const std::function<void()>& poll) const {
  const int num_local = control_.num_experts / control_.num_ranks;
  require_open();
  require(ticket != 0 && ticket == ticket_, "ticket ", ticket, " is not that of the last plan");
  require(rows_of_expert.dtype == DType::kInt64 && rows_of_expert.num_elements() == num_local,
          "rows_of_expert must be int64 [", num_local, "] on the CPU");
  auto* rows = static_cast<std::int64_t*>(rows_of_expert.data);
  const auto start = Clock::now();
  PlanSizes sizes{};
  const auto is_told = [&] {
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
    sizes = {static_cast<std::int64_t>(words[0]), static_cast<std::int64_t>(words[1]),
             static_cast<std::int64_t>(words[2]), static_cast<std::uint32_t>(words[3])};
    return true;
  };
  // The device has a deadline of its own and knows who was late, so this one is longer; it is for
  // when the plan's kernel lies behind other work of the stream.
  const double limit = 2 * timeout_s_;
  Every query(kQueryInterval), signals(kPollInterval);
  for (std::uint64_t turn = 1; !is_told(); ++turn) {
    if (turn % 1024 != 0) continue;
    if (mailbox_->failed_phase != 0) return std::nullopt;
    const double waited = seconds_since(start);
    if (query.is_due(waited)) {
      // A fault of any kernel before this one shows here; the mailbox would never say so.
      const cudaError_t status = cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream));
      if (status == cudaSuccess && !is_told()) {
        if (mailbox_->failed_phase != 0) return std::nullopt;
        fail("the device is done with a plan and has not counted its rows");
      }
      if (status != cudaErrorNotReady) cuda_check(status, "waiting for a plan's rows");
    }
    if (signals.is_due(waited)) poll();
    if (waited > limit) {
      fail("the device did not count the rows of a plan within ", limit,
           " s: it is busy with what was queued before");
    }
  }
  plan.num_pairs = sizes.num_pairs;
  plan.num_assignments = sizes.num_assignments;
  if (sizes.bad_ranks == 0) plan.num_rows = sizes.num_rows;
  return sizes;
}

void Group::wait_until_idle(const std::function<void()>& poll) const {
  if (!last_.is_some || last_.done == nullptr) return;
  const auto start = Clock::now();
  Every signals(kPollInterval);
  for (;;) {
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(last_.done));
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) cuda_check(status, "waiting for the group's last operation");
    const double waited = seconds_since(start);
    if (signals.is_due(waited)) poll();
    // Soon over as a rule; a rank that waits for another one can take as long as the deadline.
    if (waited > kQueryInterval) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::optional<Failure> Group::failure() const {
  if (mailbox_ == nullptr || mailbox_->failed_phase == 0) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  return Failure{static_cast<Reason>(mailbox_->failed_reason),
                 static_cast<Phase>(mailbox_->failed_phase),
                 mailbox_->failed_peer,
                 mailbox_->failed_epoch,
                 static_cast<double>(mailbox_->failed_deadline_ns) * 1e-9,
                 mailbox_->failed_calls[0],
                 mailbox_->failed_calls[1]};
}

std::uint32_t Group::bad_ranks(bool forget) {
  const std::uint32_t ranks = mailbox_ == nullptr ? 0 : mailbox_->bad_ranks;
  if (forget && mailbox_ != nullptr) mailbox_->bad_ranks = 0;
  return ranks;
}

void Group::copy_waited_ns(const Tensor& out, std::uintptr_t stream) const {
  require(out.dtype == DType::kInt64 && out.num_elements() == 1,
          "out: must be int64 and have one element");
  auto* const on = reinterpret_cast<cudaStream_t>(stream);
  if (state_ == nullptr) {  // no windows yet: nobody has waited
    cuda_check(cudaMemsetAsync(out.data, 0, sizeof(std::int64_t), on), "cudaMemsetAsync");
    return;
  }
  cuda_check(cudaMemcpyAsync(out.data, &state_->waited_ns, sizeof(std::int64_t),
                             cudaMemcpyDeviceToDevice, on),
             "cudaMemcpyAsync");
}

std::uint32_t Group::bad_low_latency(bool forget) {
  const std::uint32_t ranks = mailbox_ == nullptr ? 0 : mailbox_->bad_low_latency;
  if (forget && mailbox_ != nullptr) mailbox_->bad_low_latency = 0;
  return ranks;
}

}  // namespace ncclep::native
