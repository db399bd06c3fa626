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

namespace standin {

Sizes sizes = {/*num_rows*/ 2,  /*num_pairs*/ 1, /*num_assignments*/ 2,
               /*bad_ranks*/ 0, /*fails*/ false, /*late_words*/ 0};

namespace {

std::vector<std::uint64_t> calls;

}  // namespace

std::vector<std::uint64_t> take_calls() { return std::exchange(calls, {}); }

}  // namespace standin

namespace ncclep::native {

namespace {

using standin::touch;

template <typename T>
void touch_all(T* memory, std::int64_t count) {
  standin::require(count >= 0, "a negative number of elements");
  touch(const_cast<std::remove_const_t<T>*>(memory), count * sizeof(T));
}

// A kernel of a group.  It has this rank's memory only: the others' windows are on other machines'
// GPUs, so to speak.
void check_rank(const KernelContext& me, int num_sms, std::uintptr_t stream) {
  standin::note_kernel(stream);
  if (me.call != 0) standin::calls.push_back(me.call);
  const Control& control = me.control;
  standin::require(0 < control.num_ranks && control.num_ranks <= kMaxRanks, "ranks");
  standin::require(0 <= me.rank && me.rank < control.num_ranks, "rank");
  standin::require(0 < control.num_experts && control.num_experts <= kMaxExperts, "experts");
  standin::require(control.num_experts % control.num_ranks == 0, "experts of a rank");
  standin::require(control.max_tokens <= kMaxTokens && control.max_tokens % kChunk == 0, "tokens");
  standin::require(0 < control.max_top_k && control.max_top_k <= kMaxTopK, "top-k");
  standin::require(me.deadline_ns > 0 && me.deadline_ns < UINT64_MAX / 2, "deadline");
  standin::require(min_ctas(control.num_ranks) <= num_sms && num_sms <= 132, "SMs");
  touch(me.control_of[me.rank], control.num_bytes());
  touch(me.rows_of[me.rank], me.dispatch_bytes * (2 + control.num_ranks));
  touch(me.state, sizeof(*me.state));
}

void check_scratch(const KernelContext& me, const PlanScratch& scratch) {
  touch_all(scratch.parts, PlanScratch::size(me.control, 132));
}

void check_alignment(int alignment) {
  standin::require(0 < alignment && alignment <= 256, "alignment");
}

void check_tokens(const KernelContext& me, int num_tokens, int most_tokens, int top_k) {
  standin::require(0 <= num_tokens && num_tokens <= most_tokens, "tokens of this rank");
  standin::require(most_tokens <= me.control.max_tokens, "tokens in the windows");
  standin::require(0 < top_k && top_k <= me.control.max_top_k, "top-k in the windows");
}

void touch_topk(const void* topk_idx, bool is_int64, int num_tokens, int top_k) {
  touch(const_cast<void*>(topk_idx),
        static_cast<std::size_t>(num_tokens) * top_k * (is_int64 ? 8 : 4));
}

void touch_token_routes(const TokenRoutes& token_routes, int num_tokens) {
  touch_all(token_routes.token_ranks, 4 * static_cast<std::int64_t>(num_tokens));
}

void touch_routes(const KernelContext& me, const ReceivedRoutes& routes) {
  standin::require(routes.num_chunks <= me.control.max_chunks(), "chunks in the windows");
  touch_all(routes.first_pair, ReceivedRoutes::size(me.control.num_ranks, routes.num_chunks,
                                                    routes.max_pairs, routes.max_assignments));
}

void touch_rows(const void* rows, std::int64_t num_rows, int row_bytes) {
  standin::require(row_bytes > 0 && row_bytes % 16 == 0, "bytes of a row");
  standin::require(reinterpret_cast<std::uintptr_t>(rows) % 16 == 0, "start of rows");
  touch(const_cast<void*>(rows), static_cast<std::size_t>(num_rows) * row_bytes);
}

}  // namespace

void drop_what_does_not_fit(const KernelContext& me, const Drop& job, const PlanScratch& scratch,
                            int num_sms, std::uintptr_t stream) {
  check_rank(me, num_sms, stream);
  check_scratch(me, scratch);
  check_alignment(job.alignment);
  check_tokens(me, job.num_tokens, me.control.max_tokens, job.top_k);
  standin::require(job.max_recv_rows > 0, "rows in static mode");
  touch_topk(job.topk_idx, job.is_int64, job.num_tokens, job.top_k);
  touch_all(job.kept, static_cast<std::int64_t>(job.num_tokens) * job.top_k);
  touch_all(job.num_wanted, 1);
  if (job.lacked != nullptr) touch_all(job.lacked, me.control.num_ranks);
}

void plan_count(const KernelContext& me, const PlanCount& job, const PlanScratch& scratch,
                int num_sms, std::uintptr_t stream) {
  check_rank(me, num_sms, stream);
  check_scratch(me, scratch);
  check_alignment(job.alignment);
  check_tokens(me, job.num_tokens, job.most_chunks * kChunk, job.top_k);
  touch_topk(job.topk_idx, job.is_int64, job.num_tokens, job.top_k);
  touch_all(job.tokens_per_expert, 2 * me.control.num_local() + 1);
  touch_token_routes(job.token_routes, job.num_tokens);
  if (job.ticket == 0) return;
  const int num_local = me.control.num_local();
  const auto tell = [mailbox = me.mailbox, ticket = job.ticket, num_local,
                     found = standin::sizes](bool is_late) {
    if (found.fails && is_late == (found.late_words != 0)) {
      mailbox->failed_peer = 1;
      mailbox->failed_epoch = 7;
      mailbox->failed_phase = static_cast<std::uint32_t>(Phase::kPlan);
    }
    if (found.fails) return;
    const std::uint32_t words[] = {found.num_rows, found.num_pairs, found.num_assignments,
                                   found.bad_ranks};
    for (int i = 0; i < 4 + num_local; ++i) {
      if ((found.late_words >> i & 1) != is_late) continue;
      const std::uint64_t upper = static_cast<std::uint64_t>(ticket) << 32;
      if (i < 4) {
        mailbox->sizes[i] = upper | words[i];
      } else {
        mailbox->rows_of_expert[i - 4] = upper | (found.num_rows / num_local);
      }
    }
  };
  standin::run_on_device(stream, [tell] { tell(false); });
  if (standin::sizes.late_words == 0) return;
  standin::hold(stream);
  standin::run_on_device(stream, [tell] { tell(true); });
}

void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream) {
  standin::note_kernel(stream);
  standin::require(me.control_of[me.rank] != nullptr && phase != Phase::kNone, "a refusal");
}

void plan_receive(const KernelContext& me, const ReceivedRoutes& routes, const PlanScratch& scratch,
                  int num_sms, std::uintptr_t stream) {
  check_rank(me, num_sms, stream);
  check_scratch(me, scratch);
  touch_routes(me, routes);
}

void dispatch(const KernelContext& me, const Dispatch& job, int num_sms, std::uintptr_t stream) {
  check_rank(me, num_sms, stream);
  check_tokens(me, job.num_tokens, job.most_tokens, job.top_k);
  standin::require(0 < job.num_phases && job.num_phases <= kPhases, "phases");
  const std::size_t staged = static_cast<std::size_t>(job.num_tokens) * job.row_bytes;
  standin::require(staged <= me.dispatch_bytes, "rows in the windows");
  touch_rows(job.x, job.num_tokens, job.row_bytes);
  touch_rows(job.rows, job.num_rows, job.row_bytes);
  touch_all(job.tokens_per_expert, me.control.num_local());
  touch_all(job.routed_per_expert, me.control.num_local());
  touch_all(job.token_ranks, job.num_tokens);
  touch_routes(me, job.routes);
  if (!job.has_weights) return;
  touch_all(job.w, static_cast<std::int64_t>(job.num_tokens) * job.top_k);
  touch_all(job.row_w, job.num_rows);
}

void combine(const KernelContext& me, const Combine& job, int num_sms, std::uintptr_t stream) {
  check_rank(me, num_sms, stream);
  check_tokens(me, job.num_tokens, me.control.max_tokens, job.top_k);
  standin::require(itemsize_of(job.dtype) == 4 || itemsize_of(job.dtype) == 2, "dtype");
  touch_rows(job.y, standin::sizes.num_rows, job.row_bytes);
  touch_rows(job.out, job.num_tokens, job.row_bytes);
  touch_token_routes(job.token_routes, job.num_tokens);
  touch_routes(me, job.routes);
  const bool sends =
      split_combine(num_sms, me.control.num_ranks, job.top_k, job.row_bytes).sending > 0;
  touch_rows(job.sums, sends ? standin::sizes.num_pairs : 0, job.row_bytes);
  if (!job.has_weights) return;
  touch_all(job.w, standin::sizes.num_rows);
  touch_all(job.topk_w, static_cast<std::int64_t>(job.num_tokens) * job.top_k);
}

namespace {

void check_low_latency(const KernelContext& me, const LowLatencyContext& ll, int num_tokens,
                       int num_ctas, std::uintptr_t stream) {
  check_rank(me, 32, stream);
  const LowLatencyWindow& window = ll.window;
  standin::require(window.num_ranks == me.control.num_ranks, "ranks of the window");
  standin::require(0 < window.max_tokens && window.max_tokens <= kLowLatencyTokens, "tokens");
  standin::require(0 < window.top_k && window.top_k <= kMaxTopK, "top-k");
  for (const int num_bytes : {window.row_bytes, window.scale_bytes, window.sum_bytes}) {
    standin::require(0 <= num_bytes && num_bytes % 16 == 0, "bytes of a row");
  }
  standin::require(0 <= num_tokens && num_tokens <= window.max_tokens, "tokens in the window");
  standin::require(0 < num_ctas && num_ctas <= 132, "CTAs");
  touch(ll.window_of[me.rank], window.num_bytes());
  touch(ll.state, sizeof(*ll.state));
}

}  // namespace

void low_latency_dispatch(const KernelContext& me, const LowLatencyContext& ll,
                          const LowLatencyDispatch& job, int num_ctas, std::uintptr_t stream) {
  check_low_latency(me, ll, job.num_tokens, num_ctas, stream);
  const LowLatencyWindow& window = ll.window;
  touch_all(job.counts, window.num_ranks);
  if (!job.sends) return;
  touch_rows(job.x, job.num_tokens, window.row_bytes);
  if (window.scale_bytes > 0) touch_rows(job.scales, job.num_tokens, window.scale_bytes);
  touch_topk(job.topk_idx, job.is_int64, job.num_tokens, window.top_k);
  touch_all(job.weights, static_cast<std::int64_t>(job.num_tokens) * window.top_k);
}

void low_latency_combine(const KernelContext& me, const LowLatencyContext& ll,
                         const LowLatencyCombine& job, int num_ctas, std::uintptr_t stream) {
  check_low_latency(me, ll, job.num_tokens, num_ctas, stream);
  const LowLatencyWindow& window = ll.window;
  standin::require(itemsize_of(job.dtype) == 4 || itemsize_of(job.dtype) == 2, "dtype");
  if (job.rows_of != nullptr) touch_all(job.rows_of, window.places() * window.top_k);
  const bool has_places = job.rows_of == nullptr;
  touch_rows(job.y, has_places ? window.places() : job.num_rows, window.sum_bytes);
  touch_rows(job.out, job.num_tokens, window.sum_bytes);
}

// The peers of the stand-in's windows have no memory: tests/native/window_check.cpp checks some
// that have.
void check_windows(const Agreement&, const std::vector<WindowView>&, int, std::uint64_t,
                   const std::string&) {}

namespace {

void check_messages(std::int64_t row_bytes, int first, int piece_bytes, int num_weights,
                    int message_bytes) {
  standin::require(0 <= first && 0 < piece_bytes && first + piece_bytes <= row_bytes, "piece");
  standin::require((row_bytes | first | piece_bytes | message_bytes) % kMessageVector == 0,
                   "vectors of rows");
  standin::require(0 <= num_weights && piece_bytes + 4 * num_weights <= message_bytes, "weights");
}

}  // namespace

void pack_messages(const PackMessages& job, std::uintptr_t) {
  check_messages(job.row_bytes, job.first, job.piece_bytes, job.num_weights, job.message_bytes);
  standin::require(job.token != nullptr || job.tokens_each > 0 || job.num_messages == 0, "tokens");
  touch_all(job.rows, job.num_tokens * job.row_bytes);
  if (job.w != nullptr) touch_all(job.w, job.num_tokens * job.num_weights);
  if (job.token != nullptr) touch_all(job.token, job.num_messages);
  touch_all(job.messages, job.num_messages * job.message_bytes);
}

void unpack_messages(const UnpackMessages& job, std::uintptr_t) {
  check_messages(job.row_bytes, 0, job.row_bytes, job.num_weights, job.message_bytes);
  touch_all(job.messages, job.num_messages * job.message_bytes);
  touch_all(job.rows, job.num_messages * job.row_bytes);
  touch_all(job.w, job.num_messages * job.num_weights);
}

void add_up_messages(const AddUpMessages& job, std::uintptr_t) {
  check_messages(job.row_bytes, job.first, job.piece_bytes, job.num_weights, job.message_bytes);
  touch_all(job.place, job.num_nodes * job.num_tokens);
  touch_all(job.out, job.num_tokens * job.row_bytes);
  if (job.topk_w == nullptr) return;
  touch_all(job.assignment_node, job.num_tokens * job.num_weights);
  touch_all(job.topk_w, job.num_tokens * job.num_weights);
}

}  // namespace ncclep::native

namespace ncclep::routes {

void routes_and_weights(const RoutesAndWeights& job, std::uintptr_t) {
  standin::require(job.num_experts >= 0 && job.top_k >= 0, "experts and assignments");
  standin::require(job.itemsize == 2 || job.itemsize == 4 || job.itemsize == 8, "itemsize");
  const std::size_t maps = job.num_tokens * job.num_experts,
                    assignments = job.num_tokens * job.top_k;
  standin::touch(const_cast<std::uint8_t*>(job.routing_map), maps);
  standin::touch(const_cast<void*>(job.probs), maps * job.itemsize);
  standin::touch(job.topk_idx, assignments * 8);
  standin::touch(job.weights, assignments * job.itemsize);
}

void probs_gradient(const ProbsGradient& job, std::uintptr_t) {
  standin::require(job.num_experts >= 0 && job.top_k >= 0, "experts and assignments");
  standin::require(job.itemsize == 2 || job.itemsize == 4 || job.itemsize == 8, "itemsize");
  const std::size_t assignments = job.num_tokens * job.top_k;
  standin::touch(const_cast<std::int64_t*>(job.topk_idx), assignments * 8);
  standin::touch(const_cast<void*>(job.grad_weights), assignments * job.itemsize);
  standin::touch(job.grad_probs, job.num_tokens * job.num_experts * job.itemsize);
}

}  // namespace ncclep::routes

namespace ncclep::bench {

// What it refuses is refused by the function that launches the real one.
void copy_rows(const CopyRows& job, int num_sms, std::uintptr_t) {
  require(job.row_bytes > 0 && job.row_bytes % 16 == 0 && job.row_bytes <= 51200, "row_bytes");
  require(job.peers.size() <= kMaxPeers, "peers");
  require(num_sms > 0, "num_sms");
  standin::touch(const_cast<int*>(job.peer_of_row), job.num_rows * sizeof(int));
  standin::touch(const_cast<int*>(job.peer_row), job.num_rows * sizeof(int));
}

void stamp(std::int64_t* to, std::uintptr_t) { standin::touch(to, sizeof(*to)); }

}  // namespace ncclep::bench
