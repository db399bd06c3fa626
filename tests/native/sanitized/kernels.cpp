// In place of the kernels: they touch what the real ones may, and require what those assume.
#include <vector>

#include "native/device/refusal.h"
#include "native/host/window_check.h"
#include "native/low_latency/protocol.h"
#include "native/plan/overflow.h"
#include "native/plan/plan.h"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"
#include "standin.h"

standin::Plans standin::plans;

namespace {

// Reads and writes `count` elements: one byte of each 8 that a sanitizer tells apart, and the last.
template <typename T>
void touch(T* memory, std::int64_t count) {
  REQUIRE(count >= 0);
  auto* bytes = reinterpret_cast<volatile char*>(const_cast<std::remove_const_t<T>*>(memory));
  const std::size_t num_bytes = count * sizeof(T);
  for (std::size_t i = 0; i < num_bytes; i += 8) bytes[i] = bytes[i];
  if (num_bytes > 0) bytes[num_bytes - 1] = bytes[num_bytes - 1];
}
void touch_bytes(const void* memory, std::int64_t num_bytes) {
  touch(static_cast<const char*>(memory), num_bytes);
}

}  // namespace

namespace ncclep::native {

namespace {

// A kernel of a group.  It has this rank's memory only: the others' windows are on other machines'
// GPUs, so to speak.
void check_context(const KernelContext& me, int num_sms, std::uintptr_t stream) {
  standin::note_kernel(stream);
  const Control& control = me.control;
  REQUIRE(0 < control.num_ranks && control.num_ranks <= kMaxRanks);
  REQUIRE(0 <= me.rank && me.rank < control.num_ranks);
  REQUIRE(0 < control.num_experts && control.num_experts % control.num_ranks == 0);
  REQUIRE(control.max_tokens <= kMaxTokens && control.max_tokens % kChunk == 0);
  REQUIRE(0 < control.max_top_k && control.max_top_k <= kMaxTopK);
  REQUIRE(me.deadline_ns > 0 && me.deadline_ns < UINT64_MAX / 2);
  REQUIRE(min_ctas(control.num_ranks) <= num_sms && num_sms <= 132);
  touch_bytes(me.control_of[me.rank], control.num_bytes());
  touch_bytes(me.rows_of[me.rank], me.dispatch_bytes * (2 + control.num_ranks));
  touch(me.state, 1);
}

void check_plan(const KernelContext& me, const PlanScratch& scratch, int alignment, int num_sms,
                std::uintptr_t stream) {
  check_context(me, num_sms, stream);
  touch(scratch.parts, PlanScratch::size(me.control, 132));
  REQUIRE(0 < alignment && alignment <= 256);
}

void check_tokens(const KernelContext& me, int num_tokens, int most_tokens, int top_k) {
  REQUIRE(0 <= num_tokens && num_tokens <= most_tokens);
  REQUIRE(most_tokens <= me.control.max_tokens);
  REQUIRE(0 < top_k && top_k <= me.control.max_top_k);
}

void touch_topk(const void* topk_idx, bool is_int64, std::int64_t num_tokens, int top_k) {
  touch_bytes(topk_idx, num_tokens * top_k * (is_int64 ? 8 : 4));
}

void touch_routes(const KernelContext& me, const ReceivedRoutes& routes) {
  REQUIRE(routes.num_chunks <= me.control.max_chunks());
  touch(routes.first_pair, ReceivedRoutes::size(me.control.num_ranks, routes.num_chunks,
                                                routes.max_pairs, routes.max_assignments));
}

void touch_rows(const void* rows, std::int64_t num_rows, int row_bytes) {
  REQUIRE(row_bytes > 0 && row_bytes % 16 == 0);
  REQUIRE(reinterpret_cast<std::uintptr_t>(rows) % 16 == 0);
  touch_bytes(rows, num_rows * row_bytes);
}

void check_dtype_of_sums(DType dtype) {
  REQUIRE(itemsize_of(dtype) == 4 || itemsize_of(dtype) == 2);
}

}  // namespace

void drop_what_does_not_fit(const KernelContext& me, const Drop& job, const PlanScratch& scratch,
                            int num_sms, std::uintptr_t stream) {
  check_plan(me, scratch, job.alignment, num_sms, stream);
  check_tokens(me, job.num_tokens, me.control.max_tokens, job.top_k);
  REQUIRE(job.max_recv_rows > 0);
  touch_topk(job.topk_idx, job.is_int64, job.num_tokens, job.top_k);
  touch(job.kept, std::int64_t{1} * job.num_tokens * job.top_k);
  touch(job.num_wanted, 1);
  if (job.lacked != nullptr) touch(job.lacked, me.control.num_ranks);
}

void plan_count(const KernelContext& me, const PlanCount& job, const PlanScratch& scratch,
                int num_sms, std::uintptr_t stream) {
  check_plan(me, scratch, job.alignment, num_sms, stream);
  check_tokens(me, job.num_tokens, job.most_chunks * kChunk, job.top_k);
  touch_topk(job.topk_idx, job.is_int64, job.num_tokens, job.top_k);
  const int num_local = me.control.num_local();
  touch(job.tokens_per_expert, 2 * num_local + 1);
  touch(job.token_routes.token_ranks, 4 * std::int64_t{job.num_tokens});
  if (job.ticket == 0) return;
  const auto post = [&mailbox = *me.mailbox, num_local, ticket = std::uint64_t{job.ticket} << 32,
                     plan = standin::plans](bool is_late) {
    if (plan.fail && is_late == (plan.late_words != 0)) {
      mailbox.failed_peer = 1;
      mailbox.failed_reason = static_cast<std::uint32_t>(Reason::kLate);
      mailbox.failed_phase = static_cast<std::uint32_t>(Phase::kPlan);
    }
    const std::uint32_t words[] = {plan.rows, plan.pairs, plan.assignments, plan.bad_ranks};
    for (int i = 0; !plan.fail && i < 4 + num_local; ++i) {
      if ((plan.late_words >> i & 1) != is_late) continue;
      (i < 4 ? mailbox.sizes[i] : mailbox.rows_of_expert[i - 4]) =
          ticket | (i < 4 ? words[i] : plan.rows / num_local);
    }
  };
  standin::run_on_device(stream, [post] { post(false); });
  if (standin::plans.late_words == 0) return;
  standin::hold(stream);
  standin::run_on_device(stream, [post] { post(true); });
}

void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream) {
  standin::note_kernel(stream);
  REQUIRE(me.control_of[me.rank] != nullptr && phase != Phase::kNone);
}

void plan_receive(const KernelContext& me, const ReceivedRoutes& routes, const PlanScratch& scratch,
                  int num_sms, std::uintptr_t stream) {
  check_plan(me, scratch, 1, num_sms, stream);
  touch_routes(me, routes);
}

void dispatch(const KernelContext& me, const Dispatch& job, int num_sms, std::uintptr_t stream) {
  check_context(me, num_sms, stream);
  check_tokens(me, job.num_tokens, job.most_tokens, job.top_k);
  REQUIRE(0 < job.num_phases && job.num_phases <= kPhases);
  const std::size_t staged = static_cast<std::size_t>(job.num_tokens) * job.row_bytes;
  REQUIRE(staged <= me.dispatch_bytes);
  touch_rows(job.x, job.num_tokens, job.row_bytes);
  touch_rows(job.rows, job.num_rows, job.row_bytes);
  touch(job.tokens_per_expert, me.control.num_local());
  touch(job.routed_per_expert, me.control.num_local());
  touch(job.token_ranks, job.num_tokens);
  touch_routes(me, job.routes);
  if (!job.has_weights) return;
  touch(job.w, std::int64_t{1} * job.num_tokens * job.top_k);
  touch(job.row_w, job.num_rows);
}

void combine(const KernelContext& me, const Combine& job, int num_sms, std::uintptr_t stream) {
  check_context(me, num_sms, stream);
  check_tokens(me, job.num_tokens, me.control.max_tokens, job.top_k);
  check_dtype_of_sums(job.dtype);
  const CombineSplit split = split_combine(num_sms, me.control.num_ranks, job.top_k, job.row_bytes);
  touch_rows(job.y, standin::plans.rows, job.row_bytes);
  touch_rows(job.sums, split.sending > 0 ? standin::plans.pairs : 0, job.row_bytes);
  touch_rows(job.out, job.num_tokens, job.row_bytes);
  touch(job.token_routes.token_ranks, 4 * std::int64_t{job.num_tokens});
  touch_routes(me, job.routes);
  if (!job.has_weights) return;
  touch(job.w, standin::plans.rows);
  touch(job.topk_w, std::int64_t{1} * job.num_tokens * job.top_k);
}

namespace {

void check_low_latency(const KernelContext& me, const LowLatencyContext& ll, int num_tokens,
                       int num_ctas, std::uintptr_t stream) {
  check_context(me, 32, stream);
  const LowLatencyWindow& window = ll.window;
  REQUIRE(window.num_ranks == me.control.num_ranks);
  REQUIRE(0 < window.max_tokens && window.max_tokens <= kLowLatencyTokens);
  REQUIRE(0 < window.top_k && window.top_k <= kMaxTopK);
  for (const int num_bytes : {window.row_bytes, window.scale_bytes, window.sum_bytes}) {
    REQUIRE(0 <= num_bytes && num_bytes % 16 == 0);
  }
  REQUIRE(0 <= num_tokens && num_tokens <= window.max_tokens);
  REQUIRE(0 < num_ctas && num_ctas <= 132);
  touch_bytes(ll.window_of[me.rank], window.num_bytes());
  touch(ll.state, 1);
}

}  // namespace

void low_latency_dispatch(const KernelContext& me, const LowLatencyContext& ll,
                          const LowLatencyDispatch& job, int num_ctas, std::uintptr_t stream) {
  check_low_latency(me, ll, job.num_tokens, num_ctas, stream);
  const LowLatencyWindow& window = ll.window;
  touch(job.counts, window.num_ranks);
  if (!job.sends) return;
  touch_rows(job.x, job.num_tokens, window.row_bytes);
  if (window.scale_bytes > 0) touch_rows(job.scales, job.num_tokens, window.scale_bytes);
  touch_topk(job.topk_idx, job.is_int64, job.num_tokens, window.top_k);
  touch(job.weights, std::int64_t{1} * job.num_tokens * window.top_k);
}

void low_latency_combine(const KernelContext& me, const LowLatencyContext& ll,
                         const LowLatencyCombine& job, int num_ctas, std::uintptr_t stream) {
  check_low_latency(me, ll, job.num_tokens, num_ctas, stream);
  const LowLatencyWindow& window = ll.window;
  check_dtype_of_sums(job.dtype);
  if (job.rows_of != nullptr) touch(job.rows_of, window.places() * window.top_k);
  const std::int64_t num_rows = job.rows_of == nullptr ? window.places() : job.num_rows;
  touch_rows(job.y, num_rows, window.sum_bytes);
  touch_rows(job.out, job.num_tokens, window.sum_bytes);
}

// The peers of the stand-in's windows have no memory: tests/native/window_check.cpp checks some
// that have.
void check_windows(const Agreement&, const std::vector<WindowView>&, int, std::uint64_t,
                   const std::string&) {}

}  // namespace ncclep::native
