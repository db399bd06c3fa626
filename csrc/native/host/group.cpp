// The group's lifecycle: windows, state, and the context of its kernels.
#include "native/host/group.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/cuda.h"
#include "native/device/stop.h"
#include "native/host/checks.h"
#include "native/host/window_check.h"
#include "native/plan/plan.h"

namespace ncclep::native {

namespace {

// With several domains, a rows window that would be larger is for rounds.
constexpr std::size_t kMostRowsBytes = std::size_t{2} << 30;

constexpr char kWiderBuild[] = " in a build without machine code for sm_100 or newer";

}  // namespace

WindowSizes window_sizes(Control control, const ncclepShape_t& shape) {
  check_shape(shape);
  control.max_tokens = num_chunks_of(shape.num_tokens) * kChunk;
  control.max_top_k = shape.top_k;
  control.num_rounds = num_rounds_for(control, shape.row_bytes, kMostRowsBytes);
  return {control, shape.row_bytes, control_window_bytes(control),
          rows_window_bytes(control, shape.row_bytes)};
}

template <int kGroups>
DomainWindowsOf<kGroups> windows_of_domain(const Communicator& communicator, const Window& window) {
  DomainWindowsOf<kGroups> windows{{}, communicator.rank_in_domain(0)};
  std::copy(window.peers().begin(), window.peers().end(), windows.of_local_rank);
  return windows;
}
template DomainWindows windows_of_domain(const Communicator& communicator, const Window& window);

Group::Group(std::shared_ptr<Communicator> communicator, int num_experts, double timeout_s)
    : communicator_(std::move(communicator)),
      control_{communicator_->num_ranks(), num_experts, 0, 0},
      timeout_s_(timeout_s),
      longest_timeout_s_(timeout_s) {
  check_group(communicator_->num_ranks(), num_experts, timeout_s);
  const int locals = communicator_->lsa_size();
  require(locals <= kBuiltLocalRanks, locals, " ranks of one NVLink domain: at most ",
          kBuiltLocalRanks, kBuiltLocalRanks < kMaxLocalRanks ? kWiderBuild : "");
  if (locals < communicator_->num_ranks()) {
    const int first = communicator_->rank() / locals * locals;
    for (int local_rank = 0; local_rank < locals; ++local_rank) {
      ensure(communicator_->rank_in_domain(local_rank) == first + local_rank, "rank ",
             communicator_->rank_in_domain(local_rank), " is in the NVLink domain of rank ",
             communicator_->rank(), ": the ranks of a domain must follow each other");
    }
    const int domains = communicator_->num_domains();
    require(domains <= kMaxDomains, domains, " NVLink domains: at most ", kMaxDomains);
    network_ = std::make_shared<network::Rails>(communicator_, timeout_s, [] {}, kNumRailSignals);
    control_.num_domains = network_->num_domains();
  }
  const std::string problem = device_problem(control_.rank_groups());
  ensure(problem.empty(), "engine 'native': ", problem);
  try {
    allocate_state();
  } catch (const Error&) {
    free_state();  // nothing uses it yet, and no caller could close this object
    throw;
  }
}

void Group::allocate_state() {
  cuda_check(cudaMalloc(&state_, sizeof(State)), "cudaMalloc");
  clear_memory(state_, sizeof(State));
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
  order_ = communicator_->order();
  reached_.emplace();
}

Group::~Group() = default;  // see the class comment

bool Group::fits(const ncclepShape_t& shape) const {
  require_open();
  return shape.num_tokens <= control_.max_tokens && shape.top_k <= control_.max_top_k &&
         shape.row_bytes <= row_bytes_;
}

void Group::set_timeout(double seconds) {
  check_timeout(seconds);
  timeout_s_ = seconds;
  longest_timeout_s_ = std::max(longest_timeout_s_, seconds);
}

void Group::require_open() const { require(state_ != nullptr, "the native group was closed"); }

void Group::reserve(const ncclepShape_t& shape, std::uintptr_t stream,
                    const AllGather& all_gather) {
  check_shape(shape);
  if (fits(shape)) return;
  std::string cause;
  const auto note = [&](const char* name, std::int64_t had, std::int64_t needed) {
    if (needed <= had) return;
    cause += join_text(cause.empty() ? "" : ", ", name, " ", had, " -> ", needed);
  };
  note("tokens", control_.max_tokens, shape.num_tokens);
  note("top-k", control_.max_top_k, shape.top_k);
  note("row bytes", row_bytes_, shape.row_bytes);
  const Agreement agreement(all_gather, control_.num_ranks, cause);

  const bool is_captured = was_captured_ || is_being_captured(stream);
  const std::string problems = agreement.gather_problems(
      is_captured ? "a CUDA graph holds calls of this group" : "", "letting its windows grow");
  if (!problems.empty()) {
    throw UsageError(
        join_text("engine 'native': this batch has more tokens, a larger top-k or longer rows than "
                  "all before, "
                  "and its windows cannot grow: ",
                  problems,
                  "; run a step with the largest batch before the first capture, or close the "
                  "group's engines "
                  "and create them again"));
  }
  try {
    // Afterwards no rank uses the old windows any longer.
    agreement.on_all_ranks("leaving its windows", [&] { leave_windows(); }, "restart the job");
    agreement.on_all_ranks(
        "allocating its windows", [&] { allocate(shape); },
        "if GPU memory ran out: use smaller micro-batches");
    open_checked(*this, *communicator_, agreement, {"control", "rows"});
  } catch (...) {
    discard_windows();
    throw;
  }
  growth_ = cause;
}

void Group::allocate(const ncclepShape_t& shape) {
  require_open();
  const WindowSizes larger = window_sizes(
      control_, {sizeof(shape), std::max(control_.max_tokens, shape.num_tokens),
                 std::max(control_.max_top_k, shape.top_k), std::max(row_bytes_, shape.row_bytes)});
  for (const std::shared_ptr<Window>& window : windows()) window->close();
  discard_windows();
  const Reach reach = network_ != nullptr ? Reach::kNetwork : Reach::kDomain;
  control_window_ = std::make_shared<Window>(communicator_, larger.control_bytes, reach);
  rows_window_ = std::make_shared<Window>(communicator_, larger.rows_bytes, reach);
  control_ = larger.control;
  row_bytes_ = larger.row_bytes;
}

void Group::open() {
  for (const std::shared_ptr<Window>& window : windows()) window->open();
  if (network_ != nullptr) rails_ = make_rails(*network_, {control_window_, rows_window_});
}

void Group::clear() {
  require_open();
  // Flags hold epochs, which only increase: stale memory must not look like one.
  for (const std::shared_ptr<Window>& window : windows()) {
    clear_memory(window->address(), window->num_bytes());
  }
  // All ranks have received the last plan, but the new windows do not record that.
  clear_memory(&state_->received, sizeof(state_->received));
  if (rails_ != nullptr) {
    const OwnStream stream;
    with_context(0, [&](const auto& ctx) { begin_puts(ctx, stream.get(), *rails_); });
    stream.wait("looking at the network's queues");
  }
}

void Group::discard_windows() {
  rails_.reset();
  control_window_.reset();
  rows_window_.reset();
  control_.max_tokens = control_.max_top_k = 0;
  row_bytes_ = 0;
}

void Group::release_windows() {
  require_open();
  wait_for_calls("closing its windows", longest_timeout_s_);
  drain_network();
  for (const std::shared_ptr<Window>& window : windows()) window->close();
  discard_windows();
  was_captured_ = false;
}

void Group::close() {
  if (state_ == nullptr) return;
  release_windows();
  if (network_ != nullptr) network_->close();
  cuda_check(static_cast<cudaError_t>(free_state()), "freeing the state of the native group");
}

void Group::drain_network() {
  if (rails_ == nullptr || !rows_window_->is_open() || has_given_up()) return;
  const OwnStream stream;
  with_context(0, [&](const auto& ctx) {
    begin_puts(ctx, stream.get(), *rails_);             // puts that gave up have kept their places
    native::drain_network(ctx, stream.get(), *rails_);  // which ends with its deadline
  });
  stream.wait("waiting for what is put to windows that close");
}

bool Group::has_given_up() const {
  return mailbox_->failed_phase != static_cast<std::uint32_t>(Phase::kNone) &&
         mailbox_->failed_reason == static_cast<std::uint32_t>(Reason::kLate);
}

int Group::free_state() {
  cudaError_t first = cudaSuccess;
  const auto note = [&](cudaError_t result) { first = first == cudaSuccess ? result : first; };
  note(cudaFree(std::exchange(state_, nullptr)));
  note(cudaFree(std::exchange(plan_scratch_, nullptr)));
  note(cudaFreeHost(std::exchange(mailbox_, nullptr)));
  order_.reset();
  reached_.reset();
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

ncclepGroupInfo_t Group::info() const {
  ncclepGroupInfo_t info = NCCLEP_GROUP_INFO_INIT;
  info.num_ranks = control_.num_ranks;
  info.rank = communicator_->rank();
  info.num_experts = control_.num_experts;
  info.max_tokens = control_.max_tokens;
  info.max_top_k = control_.max_top_k;
  info.row_bytes = row_bytes_;
  info.num_bytes = num_bytes();
  info.was_captured = was_captured_;
  info.growth = growth_.c_str();
  info.num_domains = control_.num_domains;
  info.num_token_routes = TokenRoutes::rows(control_);
  return info;
}

template <int kGroups>
KernelContextOf<kGroups> Group::context(std::uint64_t call) const {
  require(rows_window_ != nullptr && rows_window_->is_open() && state_ != nullptr,
          "the native group has no windows: make them before the first call, and close it last");
  KernelContextOf<kGroups> context{};
  context.control = control_;
  context.rank = communicator_->rank();
  context.control_of = windows_of_domain<kGroups>(*communicator_, *control_window_);
  context.rows_of = windows_of_domain<kGroups>(*communicator_, *rows_window_);
  context.dispatch_bytes = native::dispatch_bytes(control_, row_bytes_);
  context.state = state_;
  context.mailbox = mailbox_on_device_;
  context.deadline_ns = static_cast<std::uint64_t>(timeout_s_ * 1e9);
  context.call = call;
  return context;
}
template KernelContext Group::context(std::uint64_t call) const;
template KernelContextOf<kMaxRankGroups> Group::context(std::uint64_t call) const;

StreamOrder::Turn Group::take_turn(std::uintptr_t stream) {
  require_open();
  return {*order_, stream, was_captured_};
}

void Group::check_num_ctas(int num_ctas) const {
  require(0 < num_ctas && num_ctas <= max_sms_, num_ctas, " CTAs: from 1 to the GPU's ", max_sms_,
          " SMs");
}

void Group::refuse(Phase phase, std::uintptr_t stream) {
  require_open();
  if (rows_window_ == nullptr || !rows_window_->is_open()) return;
  auto turn = take_turn(stream);
  with_context(0, [&](const auto& ctx) { native::refuse(ctx, phase, stream, rails_.get()); });
  turn.end();
}

}  // namespace ncclep::native
