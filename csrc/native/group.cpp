#include "native/group.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "common/cuda.h"
#include "native/call.h"
#include "native/checks.h"
#include "native/combine.h"
#include "native/dispatch.h"
#include "native/overflow.h"
#include "native/plan.h"
#include "native/refusal.h"
#include "native/split.h"

namespace ncclep::native {

namespace {

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

template <typename T>
T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data) : nullptr;
}

int row_bytes_of(const Tensor& rows) {
  return static_cast<int>(rows.shape.at(1)) * itemsize_of(rows.dtype);
}

HomeRoutes home_routes(const Tensor& home) {
  return HomeRoutes::in(pointer<std::int32_t>(home), home.shape.at(1));
}

ReceivedRoutes received_routes(const Plan& plan, int num_ranks) {
  return ReceivedRoutes::in(pointer<std::int32_t>(plan.routes), num_ranks, plan.num_chunks,
                            plan.max_pairs, plan.max_picks);
}

// The number of the capture that the stream takes part in, which no other capture has; 0: none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  cuda_check(cudaStreamGetCaptureInfo(stream, &status, &number), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusNone ? 0 : number;
}

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

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

Group::Group(std::shared_ptr<Communicator> communicator, int num_experts, double timeout_s)
    : communicator_(std::move(communicator)),
      control_{communicator_->num_ranks(), num_experts, 0, 0},
      timeout_s_(timeout_s) {
  check_group(communicator_->num_ranks(), num_experts, timeout_s);
  try {
    allocate_state();
  } catch (const Error&) {
    free_state();  // nothing uses it yet, and nobody will close this
    throw;
  }
}

void Group::allocate_state() {
  cuda_check(cudaMalloc(&state_, sizeof(State)), "cudaMalloc");
  cuda_check(cudaMemset(state_, 0, sizeof(State)), "cudaMemset");
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&max_sms_, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  cuda_check(
      cudaMalloc(&plan_scratch_, PlanScratch::size(control_, max_sms_) * sizeof(*plan_scratch_)),
      "cudaMalloc");
  cuda_check(cudaHostAlloc(&mailbox_, sizeof(Mailbox), cudaHostAllocMapped), "cudaHostAlloc");
  std::memset(static_cast<void*>(mailbox_), 0, sizeof(Mailbox));
  cuda_check(cudaHostGetDevicePointer(&mailbox_on_device_, mailbox_, 0),
             "cudaHostGetDevicePointer");
  last_.done = make_event();
  last_captured_.done = make_event();
}

Group::~Group() = default;  // see the class comment

bool Group::fits(int max_tokens, int top_k, std::size_t row_bytes) const {
  return max_tokens <= control_.max_tokens && top_k <= control_.max_top_k &&
         row_bytes <= row_bytes_;
}

void Group::set_timeout(double seconds) {
  check_timeout(seconds);
  timeout_s_ = seconds;
}

void Group::require_open() const { require(state_ != nullptr, "the native group was closed"); }

void Group::allocate(int max_tokens, int top_k, std::size_t row_bytes) {
  require_open();
  check_sizes(max_tokens, top_k, row_bytes);
  Control larger = control_;
  larger.max_tokens = std::max(larger.max_tokens, (max_tokens + kChunk - 1) / kChunk * kChunk);
  larger.max_top_k = std::max(larger.max_top_k, top_k);
  row_bytes = std::max(row_bytes_, row_bytes);
  cuda_check(cudaDeviceSynchronize(), "waiting for the device before windows grow");
  for (const std::shared_ptr<Window>& window : windows()) window->close();
  drop();
  const std::size_t dispatch_bytes = row_bytes * larger.max_tokens;
  control_window_ = std::make_shared<Window>(communicator_, larger.num_bytes());
  rows_window_ = std::make_shared<Window>(communicator_, dispatch_bytes * (2 + larger.num_ranks));
  control_ = larger;
  row_bytes_ = row_bytes;
  ++generation_;
}

void Group::open() {
  for (const std::shared_ptr<Window>& window : windows()) window->open();
}

void Group::clear() {
  require_open();
  // Flags hold epochs, which only grow: nothing that was written before may look like one.
  for (const std::shared_ptr<Window>& window : windows()) {
    cuda_check(cudaMemset(window->address(), 0, window->num_bytes()), "cudaMemset");
  }
  // All ranks have received the last plan, and nothing in the new windows says so.
  cuda_check(cudaMemset(&state_->received, 0, sizeof(state_->received)), "cudaMemset");
  cuda_check(cudaDeviceSynchronize(), "clearing the windows");
}

void Group::drop() {
  control_window_.reset();
  rows_window_.reset();
  control_.max_tokens = control_.max_top_k = 0;
  row_bytes_ = 0;
}

void Group::close() {
  if (state_ == nullptr) return;
  cuda_check(cudaDeviceSynchronize(), "waiting for the device before windows close");
  for (const std::shared_ptr<Window>& window : windows()) window->close();
  drop();
  cuda_check(static_cast<cudaError_t>(free_state()), "freeing the state of the native group");
}

int Group::free_state() {
  cudaError_t first = cudaSuccess;
  const auto note = [&](cudaError_t result) { first = first == cudaSuccess ? result : first; };
  note(cudaFree(std::exchange(state_, nullptr)));
  note(cudaFree(std::exchange(plan_scratch_, nullptr)));
  note(cudaFreeHost(std::exchange(mailbox_, nullptr)));
  for (Last* last : {&last_, &last_captured_}) {
    const auto done = static_cast<cudaEvent_t>(std::exchange(last->done, nullptr));
    if (done != nullptr) note(cudaEventDestroy(done));
  }
  return first;
}

std::vector<std::shared_ptr<Window>> Group::windows() const {
  std::vector<std::shared_ptr<Window>> found;
  for (const std::shared_ptr<Window>& window : {control_window_, rows_window_}) {
    if (window) found.push_back(window);
  }
  return found;
}

std::size_t Group::num_bytes() const {
  std::size_t sum = 0;
  for (const std::shared_ptr<Window>& window : windows()) sum += window->num_bytes();
  return sum;
}

std::int64_t Group::routes_size(std::int64_t max_pairs, std::int64_t max_picks,
                                int num_chunks) const {
  check_room(control_, max_pairs, max_picks, num_chunks);
  return ReceivedRoutes::size(control_.num_ranks, num_chunks, max_pairs, max_picks);
}

Rank Group::rank(std::uint64_t call) const {
  require(rows_window_ != nullptr && rows_window_->is_open() && state_ != nullptr,
          "the native group has no windows: making them comes first, and close last");
  Rank rank{};
  rank.control = control_;
  rank.rank = communicator_->rank();
  std::copy(control_window_->peers().begin(), control_window_->peers().end(), rank.control_of);
  std::copy(rows_window_->peers().begin(), rows_window_->peers().end(), rank.rows_of);
  rank.dispatch_bytes = row_bytes_ * control_.max_tokens;
  rank.state = state_;
  rank.mailbox = mailbox_on_device_;
  rank.deadline_ns = static_cast<std::uint64_t>(timeout_s_ * 1e9);
  rank.call = call;
  return rank;
}

PlanScratch Group::plan_scratch(int num_sms) const {
  check_num_sms(control_, num_sms, max_sms_);
  return {plan_scratch_, control_, max_sms_};
}

void Group::queue(std::uintptr_t stream_handle, const std::function<void()>& launch) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  const unsigned long long capture = capture_of(stream);
  // While it is captured a stream has no number to ask for, and waiting for itself costs nothing.
  unsigned long long number = 0;
  if (capture == 0) cuda_check(cudaStreamGetId(stream, &number), "cudaStreamGetId");
  // An event must not lead into a graph that is being captured, or out of one.
  Last& last = capture != 0 ? last_captured_ : last_;
  const auto done = static_cast<cudaEvent_t>(last.done);
  if (last.is_some && last.capture == capture && (capture != 0 || last.stream != number)) {
    cuda_check(cudaStreamWaitEvent(stream, done, 0), "cudaStreamWaitEvent");
  }
  launch();
  was_captured_ = was_captured_ || capture != 0;
  // Now, not when the next operation comes: that one must not wait for what the caller queues here
  // in between, which may itself wait for another rank.
  cuda_check(cudaEventRecord(done, stream), "cudaEventRecord");
  last.is_some = true;
  last.stream = number;
  last.capture = capture;
}

std::uint32_t Group::plan(Plan& plan, const Tensor& topk_idx, int alignment,
                          std::int64_t max_recv_rows, const std::optional<Tensor>& kept,
                          const std::optional<Tensor>& lacked, std::int64_t max_pairs,
                          std::int64_t max_picks, const Tensor& routes, int num_sms,
                          std::uintptr_t stream) {
  check_plan(control_, plan);
  check_topk(plan, topk_idx, alignment);
  require(max_recv_rows > 0 || (max_recv_rows == 0 && !kept), "a plan of ", max_recv_rows,
          " rows: only in static mode, where it is positive, picks are dropped");
  require(kept || !lacked, "a plan that drops nothing: no rank lacks anything");
  if (kept) check_drop(control_, plan, max_recv_rows, *kept, lacked);
  const bool is_static = max_recv_rows > 0;
  take_routes(plan, max_pairs, max_picks, routes);
  const PlanScratch scratch = plan_scratch(num_sms);
  PlanCount count{};
  count.topk_idx = topk_idx.data;
  count.is_int64 = topk_idx.dtype == DType::kInt64;
  count.num_tokens = static_cast<int>(topk_idx.shape.at(0));
  count.top_k = plan.top_k;
  count.most_chunks = plan.num_chunks;
  count.alignment = alignment;
  count.is_static = is_static;
  count.has_dropped = kept.has_value();
  count.tokens_per_expert = pointer<std::int64_t>(plan.counts);
  count.routed_per_expert = count.tokens_per_expert + control_.num_local();
  count.num_dropped = count.routed_per_expert + control_.num_local();
  count.home = home_routes(plan.home);
  Drop drop{};
  if (kept) {
    drop.topk_idx = count.topk_idx;
    drop.is_int64 = count.is_int64;
    drop.num_tokens = count.num_tokens;
    drop.top_k = plan.top_k;
    drop.alignment = alignment;
    drop.max_recv_rows = max_recv_rows;
    drop.kept = pointer<std::int32_t>(kept);
    drop.num_wanted = count.num_dropped;
    if (lacked) drop.lacked = pointer<std::int64_t>(*lacked);
    count.topk_idx = drop.kept;
    count.is_int64 = false;
  }
  if (is_static) {
    plan.num_rows = max_recv_rows;
  } else {
    if (++ticket_ == 0) ++ticket_;
    count.ticket = ticket_;
  }
  queue(stream, [&] {
    // In static mode the first kernel compares the ranks' calls.
    const Rank first = rank(is_static ? call_of_plan(plan.top_k, alignment, max_recv_rows) : 0);
    const Rank me = rank();
    if (kept) drop_what_does_not_fit(first, drop, scratch, num_sms, stream);
    native::plan_count(kept ? me : first, count, scratch, num_sms, stream);
    native::plan_receive(me, received_routes(plan, control_.num_ranks), scratch, num_sms, stream);
  });
  return count.ticket;
}

void Group::take_routes(Plan& plan, std::int64_t max_pairs, std::int64_t max_picks,
                        const Tensor& routes) const {
  check_routes(routes, routes_size(max_pairs, max_picks, plan.num_chunks));
  plan.max_pairs = plan.num_pairs = max_pairs;
  plan.max_picks = plan.num_picks = max_picks;
  plan.routes = routes;
}

void Group::plan_receive(Plan& plan, std::int64_t max_pairs, std::int64_t max_picks,
                         const Tensor& routes, int num_sms, std::uintptr_t stream) {
  check_plan(control_, plan);
  take_routes(plan, max_pairs, max_picks, routes);
  queue(stream, [&] {
    native::plan_receive(rank(), received_routes(plan, control_.num_ranks), plan_scratch(num_sms),
                         num_sms, stream);
  });
}

std::optional<PlanSizes> Group::wait_for_sizes(Plan& plan, std::uint32_t ticket,
                                               const Tensor& rows_of_expert, std::uintptr_t stream,
                                               const std::function<void()>& poll) const {
  const int num_local = control_.num_experts / control_.num_ranks;
  require_open();
  require(ticket != 0 && ticket == ticket_, "ticket ", ticket, " is not that of the last plan");
  require(rows_of_expert.dtype == DType::kInt64 && rows_of_expert.num_elements() == num_local,
          "rows_of_expert must be int64 [", num_local, "] on the CPU");
  auto* rows = pointer<std::int64_t>(rows_of_expert);
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
  plan.num_picks = sizes.num_picks;
  if (sizes.bad_ranks == 0) plan.num_rows = sizes.num_rows;
  return sizes;
}

std::uint32_t Group::bad_ranks(bool forget) {
  const std::uint32_t ranks = mailbox_ == nullptr ? 0 : mailbox_->bad_ranks;
  if (forget && mailbox_ != nullptr) mailbox_->bad_ranks = 0;
  return ranks;
}

std::uint32_t Group::bad_low_latency() const {
  return mailbox_ == nullptr ? 0 : mailbox_->bad_low_latency;
}

void Group::check_num_ctas(int num_ctas) const {
  require(0 < num_ctas && num_ctas <= max_sms_, num_ctas, " CTAs: from 1 to the GPU's ", max_sms_,
          " SMs");
}

void Group::dispatch(const Plan& plan, const Tensor& x, const std::optional<Tensor>& w,
                     const Tensor& rows, const std::optional<Tensor>& row_w, int num_sms,
                     std::uintptr_t stream) {
  check_received(control_, plan);
  check_rows(Phase::kDispatch, plan, row_bytes_, x, w, rows, row_w);
  check_num_sms(control_, num_sms, max_sms_);
  const int num_local = control_.num_experts / control_.num_ranks;
  Dispatch job{};
  job.x = pointer<const char>(x);
  job.w = pointer<const float>(w);
  job.rows = pointer<char>(rows);
  job.row_w = pointer<float>(row_w);
  job.has_weights = w.has_value();
  job.num_tokens = static_cast<int>(x.shape.at(0));
  job.most_tokens = plan.num_chunks * kChunk;
  job.top_k = plan.top_k;
  job.row_bytes = row_bytes_of(x);
  job.num_phases = num_phases_of(job.most_tokens, job.row_bytes);
  job.num_rows = rows.shape.at(0);
  job.tokens_per_expert = pointer<std::int64_t>(plan.counts);
  job.routed_per_expert = job.tokens_per_expert + num_local;
  job.token_ranks = home_routes(plan.home).token_ranks;
  job.routes = received_routes(plan, control_.num_ranks);
  const Rank me =
      rank(call_of_rows(Phase::kDispatch, plan.number, x.dtype, job.row_bytes, job.has_weights));
  queue(stream, [&] { native::dispatch(me, job, num_sms, stream); });
}

std::int64_t Group::sums_size(const Plan& plan, int num_sms, int row_bytes) const {
  check_plan(control_, plan);
  check_num_sms(control_, num_sms, max_sms_);
  const CombineSplit split = split_combine(num_sms, control_.num_ranks, plan.top_k, row_bytes);
  return split.sending > 0 ? plan.num_pairs : 0;
}

void Group::combine(const Plan& plan, const Tensor& y, const std::optional<Tensor>& w,
                    const std::optional<Tensor>& sums, const Tensor& out,
                    const std::optional<Tensor>& home_w, int num_sms, std::uintptr_t stream) {
  check_received(control_, plan);
  check_rows(Phase::kCombine, plan, row_bytes_, out, home_w, y, w);
  check_sums(sums, sums_size(plan, num_sms, row_bytes_of(y)), y);
  Combine job{};
  job.y = pointer<const char>(y);
  job.sums = pointer<char>(sums);
  job.w = pointer<const float>(w);
  job.out = pointer<char>(out);
  job.home_w = pointer<float>(home_w);
  job.has_weights = w.has_value();
  job.dtype = y.dtype;
  job.num_tokens = static_cast<int>(out.shape.at(0));
  job.top_k = plan.top_k;
  job.row_bytes = row_bytes_of(y);
  job.home = home_routes(plan.home);
  job.routes = received_routes(plan, control_.num_ranks);
  const Rank me =
      rank(call_of_rows(Phase::kCombine, plan.number, y.dtype, job.row_bytes, job.has_weights));
  queue(stream, [&] { native::combine(me, job, num_sms, stream); });
}

void Group::refuse(Phase phase, std::uintptr_t stream) {
  require_open();
  if (rows_window_ == nullptr || !rows_window_->is_open()) return;
  queue(stream, [&] { native::refuse(rank(), phase, stream); });
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

}  // namespace ncclep::native
