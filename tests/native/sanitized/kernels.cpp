// In place of the kernels: they touch what the real ones may, and require what those assume.
#include <utility>
#include <vector>

#include "bench/copy_rows.h"
#include "bench/stamp.h"
#include "common/error.h"
#include "hierarchical/message_packing.h"
#include "native/device/refusal.h"
#include "native/host/window_check.h"
#include "native/low_latency/protocol.h"
#include "native/plan/overflow.h"
#include "native/plan/plan.h"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"
#include "routing/routes_and_weights.h"
#include "standin.h"

using standin::touch;
using standin::touch_bytes;

namespace {

// What the next plans find (rows, pairs, assignments, bad ranks), and the words that the host is
// told only after a release: a bit for each of the four, and then for each expert of the rank.
std::uint32_t found[4] = {2, 1, 2, 0}, late_words = 0;
bool plans_fail = false;  // the deadline of a wait passes
std::uint64_t last_call = 0;

}  // namespace

extern "C" {
void standin_set_plans(std::uint32_t rows, std::uint32_t pairs, std::uint32_t assignments,
                       std::uint32_t bad_ranks, std::uint32_t late, int fail) {
  const std::uint32_t words[] = {rows, pairs, assignments, bad_ranks};
  std::copy(words, words + 4, found);
  late_words = late;
  plans_fail = fail != 0;
}
// `KernelContext::call` of the last kernel that had one since the last time; 0: none had.
std::uint64_t standin_take_call() { return std::exchange(last_call, 0); }
}

namespace ncclep::native {

namespace {

// A kernel of a group.  It has this rank's memory only: the others' windows are on other machines'
// GPUs, so to speak.
void check_context(const KernelContext& me, int num_sms, std::uintptr_t stream) {
  standin::note_kernel(stream);
  if (me.call != 0) last_call = me.call;
  const Control& control = me.control;
  standin::require(0 < control.num_ranks && control.num_ranks <= kMaxRanks, "ranks");
  standin::require(0 <= me.rank && me.rank < control.num_ranks, "rank");
  standin::require(0 < control.num_experts && control.num_experts <= kMaxExperts, "experts");
  standin::require(control.num_experts % control.num_ranks == 0, "experts of a rank");
  standin::require(control.max_tokens <= kMaxTokens && control.max_tokens % kChunk == 0, "tokens");
  standin::require(0 < control.max_top_k && control.max_top_k <= kMaxTopK, "top-k");
  standin::require(me.deadline_ns > 0 && me.deadline_ns < UINT64_MAX / 2, "deadline");
  standin::require(min_ctas(control.num_ranks) <= num_sms && num_sms <= 132, "SMs");
  touch_bytes(me.control_of[me.rank], control.num_bytes());
  touch_bytes(me.rows_of[me.rank], me.dispatch_bytes * (2 + control.num_ranks));
  touch(me.state, 1);
}

void check_plan(const KernelContext& me, const PlanScratch& scratch, int alignment, int num_sms,
                std::uintptr_t stream) {
  check_context(me, num_sms, stream);
  touch(scratch.parts, PlanScratch::size(me.control, 132));
  standin::require(0 < alignment && alignment <= 256, "alignment");
}

void check_tokens(const KernelContext& me, int num_tokens, int most_tokens, int top_k) {
  standin::require(0 <= num_tokens && num_tokens <= most_tokens, "tokens of this rank");
  standin::require(most_tokens <= me.control.max_tokens, "tokens in the windows");
  standin::require(0 < top_k && top_k <= me.control.max_top_k, "top-k in the windows");
}

void touch_topk(const void* topk_idx, bool is_int64, std::int64_t num_tokens, int top_k) {
  touch_bytes(topk_idx, num_tokens * top_k * (is_int64 ? 8 : 4));
}

void touch_routes(const KernelContext& me, const ReceivedRoutes& routes) {
  standin::require(routes.num_chunks <= me.control.max_chunks(), "chunks in the windows");
  touch(routes.first_pair, ReceivedRoutes::size(me.control.num_ranks, routes.num_chunks,
                                                routes.max_pairs, routes.max_assignments));
}

void touch_rows(const void* rows, std::int64_t num_rows, int row_bytes) {
  standin::require(row_bytes > 0 && row_bytes % 16 == 0, "bytes of a row");
  standin::require(reinterpret_cast<std::uintptr_t>(rows) % 16 == 0, "start of rows");
  touch_bytes(rows, num_rows * row_bytes);
}

void check_dtype_of_sums(DType dtype) {
  standin::require(itemsize_of(dtype) == 4 || itemsize_of(dtype) == 2, "dtype");
}

}  // namespace

void drop_what_does_not_fit(const KernelContext& me, const Drop& job, const PlanScratch& scratch,
                            int num_sms, std::uintptr_t stream) {
  check_plan(me, scratch, job.alignment, num_sms, stream);
  check_tokens(me, job.num_tokens, me.control.max_tokens, job.top_k);
  standin::require(job.max_recv_rows > 0, "rows in static mode");
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
                     words = std::vector(found, found + 4), late = late_words,
                     fails = plans_fail](bool is_late) {
    if (fails && is_late == (late != 0)) {
      mailbox.failed_peer = 1;
      mailbox.failed_reason = static_cast<std::uint32_t>(Reason::kLate);
      mailbox.failed_phase = static_cast<std::uint32_t>(Phase::kPlan);
    }
    for (int i = 0; !fails && i < 4 + num_local; ++i) {
      if ((late >> i & 1) != is_late) continue;
      (i < 4 ? mailbox.sizes[i] : mailbox.rows_of_expert[i - 4]) =
          ticket | (i < 4 ? words[i] : words[0] / num_local);
    }
  };
  standin::run_on_device(stream, [post] { post(false); });
  if (late_words == 0) return;
  standin::hold(stream);
  standin::run_on_device(stream, [post] { post(true); });
}

void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream) {
  standin::note_kernel(stream);
  standin::require(me.control_of[me.rank] != nullptr && phase != Phase::kNone, "a refusal");
}

void plan_receive(const KernelContext& me, const ReceivedRoutes& routes, const PlanScratch& scratch,
                  int num_sms, std::uintptr_t stream) {
  check_plan(me, scratch, 1, num_sms, stream);
  touch_routes(me, routes);
}

void dispatch(const KernelContext& me, const Dispatch& job, int num_sms, std::uintptr_t stream) {
  check_context(me, num_sms, stream);
  check_tokens(me, job.num_tokens, job.most_tokens, job.top_k);
  standin::require(0 < job.num_phases && job.num_phases <= kPhases, "phases");
  const std::size_t staged = static_cast<std::size_t>(job.num_tokens) * job.row_bytes;
  standin::require(staged <= me.dispatch_bytes, "rows in the windows");
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
  touch_rows(job.y, found[0], job.row_bytes);
  touch_rows(job.sums, split.sending > 0 ? found[1] : 0, job.row_bytes);
  touch_rows(job.out, job.num_tokens, job.row_bytes);
  touch(job.token_routes.token_ranks, 4 * std::int64_t{job.num_tokens});
  touch_routes(me, job.routes);
  if (!job.has_weights) return;
  touch(job.w, found[0]);
  touch(job.topk_w, std::int64_t{1} * job.num_tokens * job.top_k);
}

namespace {

void check_low_latency(const KernelContext& me, const LowLatencyContext& ll, int num_tokens,
                       int num_ctas, std::uintptr_t stream) {
  check_context(me, 32, stream);
  const LowLatencyWindow& window = ll.window;
  standin::require(window.num_ranks == me.control.num_ranks, "ranks of the window");
  standin::require(0 < window.max_tokens && window.max_tokens <= kLowLatencyTokens, "tokens");
  standin::require(0 < window.top_k && window.top_k <= kMaxTopK, "top-k");
  for (const int num_bytes : {window.row_bytes, window.scale_bytes, window.sum_bytes}) {
    standin::require(0 <= num_bytes && num_bytes % 16 == 0, "bytes of a row");
  }
  standin::require(0 <= num_tokens && num_tokens <= window.max_tokens, "tokens in the window");
  standin::require(0 < num_ctas && num_ctas <= 132, "CTAs");
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

namespace {

template <typename Job>
void check_messages(const Job& job, int first, int piece_bytes) {
  standin::require(0 <= first && 0 < piece_bytes && first + piece_bytes <= job.row_bytes, "piece");
  standin::require((job.row_bytes | first | piece_bytes | job.message_bytes) % kMessageVector == 0,
                   "vectors of rows");
  standin::require(job.num_weights >= 0 && piece_bytes + 4 * job.num_weights <= job.message_bytes,
                   "weights");
}

}  // namespace

void pack_messages(const PackMessages& job, std::uintptr_t) {
  check_messages(job, job.first, job.piece_bytes);
  standin::require(job.token != nullptr || job.tokens_each > 0 || job.num_messages == 0, "tokens");
  touch_bytes(job.rows, job.num_tokens * job.row_bytes);
  if (job.w != nullptr) touch(job.w, job.num_tokens * job.num_weights);
  if (job.token != nullptr) touch(job.token, job.num_messages);
  touch_bytes(job.messages, job.num_messages * job.message_bytes);
}

void unpack_messages(const UnpackMessages& job, std::uintptr_t) {
  check_messages(job, 0, job.row_bytes);
  touch_bytes(job.messages, job.num_messages * job.message_bytes);
  touch_bytes(job.rows, job.num_messages * job.row_bytes);
  touch(job.w, job.num_messages * job.num_weights);
}

void add_up_messages(const AddUpMessages& job, std::uintptr_t) {
  check_messages(job, job.first, job.piece_bytes);
  touch(job.place, job.num_nodes * job.num_tokens);
  touch_bytes(job.out, job.num_tokens * job.row_bytes);
  if (job.topk_w == nullptr) return;
  touch(job.assignment_node, job.num_tokens * job.num_weights);
  touch(job.topk_w, job.num_tokens * job.num_weights);
}

}  // namespace ncclep::native

namespace ncclep::routes {

namespace {

template <typename Job>
void check_sizes(const Job& job) {
  standin::require(job.num_experts >= 0 && job.top_k >= 0, "experts and assignments");
  standin::require(job.itemsize == 2 || job.itemsize == 4 || job.itemsize == 8, "itemsize");
}

}  // namespace

void routes_and_weights(const RoutesAndWeights& job, std::uintptr_t) {
  check_sizes(job);
  touch(job.routing_map, job.num_tokens * job.num_experts);
  touch_bytes(job.probs, job.num_tokens * job.num_experts * job.itemsize);
  touch(job.topk_idx, job.num_tokens * job.top_k);
  touch_bytes(job.weights, job.num_tokens * job.top_k * job.itemsize);
}

void probs_gradient(const ProbsGradient& job, std::uintptr_t) {
  check_sizes(job);
  touch(job.topk_idx, job.num_tokens * job.top_k);
  touch_bytes(job.grad_weights, job.num_tokens * job.top_k * job.itemsize);
  touch_bytes(job.grad_probs, job.num_tokens * job.num_experts * job.itemsize);
}

}  // namespace ncclep::routes

namespace ncclep::bench {

// What the function that launches the real one refuses.
void copy_rows(const CopyRows& job, int num_sms, std::uintptr_t) {
  require(job.row_bytes > 0 && job.row_bytes % 16 == 0 && job.row_bytes <= 51200, "row_bytes");
  require(job.peers.size() <= kMaxPeers, "peers");
  require(num_sms > 0, "num_sms");
  touch(job.peer_of_row, job.num_rows);
  touch(job.peer_row, job.num_rows);
}

void stamp(std::int64_t* to, std::uintptr_t) { touch(to, 1); }

}  // namespace ncclep::bench
