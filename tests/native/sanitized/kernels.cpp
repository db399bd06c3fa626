// In place of the kernels: they do nothing but let the host see what it waits for.
#include <algorithm>
#include <vector>

#include "native/device/stop.h"
#include "native/host/window_check.h"
#include "native/low_latency/protocol.h"
#include "native/plan/overflow.h"
#include "native/plan/plan.h"
#include "native/rows/combine.h"
#include "native/rows/dispatch.h"
#include "standin.h"

extern "C" int fake_num_open_windows();

standin::Plans standin::plans;
std::size_t standin::shared_bytes = 100;
standin::Launched standin::launched;

namespace ncclep::native {

namespace {

constexpr std::int32_t kMark = 77;  // what a plan's first kernel writes for other domains

std::int64_t size_of(const Control& control, const RailRoutes& routes) {
  return RailRoutes::size(control, routes.num_tokens, routes.num_chunks());
}

void note_rows(const KernelContext& ctx, int num_phases, const Rails* rails) {
  if (ctx.control.num_domains == 1) return;
  REQUIRE(rails != nullptr);
  standin::launched.num_rounds = ctx.control.num_rounds;
  standin::launched.num_phases = num_phases;
}

}  // namespace

template <>
std::size_t plan_shared_bytes<1>() {
  return standin::shared_bytes;
}
template <>
std::size_t dispatch_shared_bytes<1>() {
  return standin::shared_bytes;
}
template <>
std::size_t combine_shared_bytes<1>() {
  return standin::shared_bytes;
}

template <>
void plan_count(const KernelContext& ctx, const PlanCount& job, const PlanScratch&, int,
                std::uintptr_t stream, const Rails*) {
  standin::note_kernel(stream);
  standin::launched.received = ctx.state->received;
  if (ctx.control.num_domains > 1) {
    std::fill_n(job.rail_routes.most_chunks, size_of(ctx.control, job.rail_routes), kMark);
  }
  if (job.ticket == 0) return;
  const int num_local = ctx.control.num_local();
  const auto post = [&mailbox = *ctx.mailbox, num_local, ticket = std::uint64_t{job.ticket} << 32,
                     plan = standin::plans](bool is_late) {
    if (plan.fail && is_late == (plan.late_words != 0)) {
      mailbox.failed_peer = 1;
      mailbox.failed_calls[0] = plan.own_call;
      mailbox.failed_calls[1] = plan.peer_call;
      mailbox.failed_reason = static_cast<std::uint32_t>(Reason::kLate);
      mailbox.failed_phase = static_cast<std::uint32_t>(Phase::kPlan);
    }
    const std::uint32_t words[] = {plan.rows, plan.pairs, plan.assignments, plan.bad_rank};
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

template <>
void drop_what_does_not_fit(const KernelContext&, const Drop&, const PlanScratch&, int,
                            std::uintptr_t stream, const Rails*) {
  standin::note_kernel(stream);
}
template <>
void plan_receive(const KernelContext& ctx, const ReceivedRoutes&, const PlanScratch&, int,
                  std::uintptr_t stream, const RailRoutes& rail_routes) {
  standin::note_kernel(stream);
  ctx.state->received = ++ctx.state->plans;
  if (ctx.control.num_domains == 1) return;
  const std::int32_t* first = rail_routes.most_chunks;
  standin::require(std::all_of(first, first + size_of(ctx.control, rail_routes),
                               [](std::int32_t word) { return word == kMark; }),
                   "routes for other domains are lost when routes are received again");
}
template <>
void refuse(const KernelContext&, Phase, std::uintptr_t stream, const Rails*) {
  standin::note_kernel(stream);
}
template <>
void begin_puts(const KernelContext&, std::uintptr_t, const Rails&) {}
template <>
void drain_network(const KernelContext&, std::uintptr_t, const Rails&) {
  if (fake_num_open_windows() > 0) ++standin::launched.num_closes;
}
template <>
void dispatch(const KernelContext& ctx, const Dispatch& job, int, std::uintptr_t stream,
              const Rails* rails) {
  standin::note_kernel(stream);
  note_rows(ctx, job.num_phases, rails);
}
template <>
void combine(const KernelContext& ctx, const Combine& job, int, std::uintptr_t stream,
             const Rails* rails) {
  standin::note_kernel(stream);
  note_rows(ctx, job.num_phases, rails);
}
void low_latency_dispatch(const KernelContext&, const LowLatencyContext&, const LowLatencyDispatch&,
                          int, std::uintptr_t stream, const Rails*) {
  standin::note_kernel(stream);
}
void low_latency_combine(const KernelContext&, const LowLatencyContext&, const LowLatencyCombine&,
                         int, std::uintptr_t stream, const Rails*) {
  standin::note_kernel(stream);
}

// The peers of the stand-in's windows have no memory: tests/native/window_check.cpp checks some
// that have.
void check_windows(const Agreement&, const std::vector<WindowView>&, int, std::uint64_t,
                   const std::string&) {}

}  // namespace ncclep::native
