#include "rows.h"

#include <algorithm>

#include "native/host/call_signature.h"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;

namespace {

// Rounds, and batches that have tokens for all of them, for some or, now and then, for one; chunks
// are small, so that few tokens do.
void draw_rounds(const std::string& kind, Sizes& sizes) {
  sizes.rounds = kind == "many" ? one_of({1, 1, 2}) : one_of({1, 2, 3, 4});
  emu::kChunk = sizes.rounds > 2   ? 32
                : sizes.rounds > 1 ? one_of({32, 32, 64})
                                   : one_of({32, 64, 128});
  if (kind == "many") {
    sizes.max_tokens = sizes.rounds == 1 ? between(2, 4) : 33;
    return;
  }
  const int chunks = sizes.rounds + between(0, 1);
  sizes.max_tokens = emu::kChunk * chunks - one_of({0, 1, between(0, emu::kChunk - 8)});
  if (sizes.max_tokens > 64) sizes.max_row_bytes = std::min(sizes.max_row_bytes, 16 * 65);
}

Sizes draw_sizes(const std::string& kind, int ranks, int domains, const Starts& starts) {
  Sizes sizes{};
  sizes.ranks = ranks;
  sizes.starts = starts;
  sizes.local = between(1, 3);
  sizes.max_tokens = one_of({8, 40, 130, 300});
  sizes.max_top_k = between(1, 6);
  sizes.max_row_bytes =
      16 * (sizes.max_tokens > 200 ? one_of({4, 16, 65}) : one_of({16, 129, 384}));
  emu::kMaxHeldBytes = 8 * 1024;
  if (kind == "chunks") {
    sizes.max_tokens = 550;
    sizes.max_top_k = between(1, 3);
    sizes.max_row_bytes = 16;
    emu::kMaxHeldBytes = 3 * 1024;  // one chunk or two
  } else if (kind == "experts") {
    sizes.local = between(33, 40);
    sizes.max_tokens = one_of({8, 40});
    sizes.max_top_k = ranks <= 3 ? 16 : 8;
    sizes.max_row_bytes = 64;
  } else if (kind == "many") {
    sizes.max_tokens = between(2, 4);
    sizes.max_row_bytes = 32;
  } else if (kind == "combines") {
    sizes.max_tokens = 400;
    sizes.max_row_bytes = 16 * one_of({1, 4});
  } else if (kind == "calls") {
    sizes.max_tokens = 8;
    sizes.max_row_bytes = 16;
  } else if (kind != "rows") {
    sizes.max_tokens = one_of({8, 40, 130});
    sizes.max_row_bytes = 16 * one_of({4, 65});
  }
  sizes.max_top_k = std::min(sizes.experts(), sizes.max_top_k);
  sizes.domains = domains;
  emu::kChunk = 128;
  if (domains > 1) draw_rounds(kind, sizes);
  return sizes;
}

// What a kind of sequence is made of: plans and dispatches of 10 steps, and invalid assignments of
// 1000.
struct Shares {
  int plans = 2, dispatches = 4, bad_assignments = 0;
};

Shares shares_of(const std::string& kind) {
  if (kind == "dispatches") return {1, 8, 0};
  if (kind == "combines") return {1, 0, 0};
  if (kind == "plans") return {8, 1, between(5, 40)};
  if (kind == "many") return {2, 4, 500};
  if (kind == "late") return {5, 3, 0};
  return {};
}

void require_nan(Memory& memory, const char* what, int rank) {
  require(memory.is_filled_with(0xff), what, " of rank ", rank,
          ", whose group has failed: not all NaN");
}

}  // namespace

std::unique_ptr<Sequence> draw_rows(const Kind& kind, int ranks, int domains,
                                    const Starts& starts) {
  Sizes sizes = draw_sizes(kind.name, ranks, domains, starts);
  if (kind.is_wide) {
    sizes.local = 1;
    sizes.max_top_k = between(2, 6);
    if (sizes.rounds == 1) sizes.max_tokens = between(2, 4);
    sizes.max_row_bytes = 32;
    emu::kMaxHeldBytes = 40 * 1024;  // a chunk, with tokens' assignments for each rank
  }
  return std::make_unique<Rows>(kind, sizes);
}

Rows::Rows(const Kind& kind, const Sizes& drawn)
    : Sequence(drawn), kind_(kind), other_(one_of({0, 1, 2, 3, between(4, 10), between(11, 17)})) {
  draw_steps(kind.name == "many" ? 4 : kind.has_failure ? between(4, 9) : between(5, 13));
  if (kind.has_failure) {  // a plan at the end: a rank that is alone does not get past it
    steps_.push_back(steps_.front());
    steps_.back().plan = static_cast<int>(routings_.size());
    routings_.push_back(draw_routing(sizes, 0));
  }
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    ranks_.emplace_back(routings_.size(), sizes.starts);
  }
}

// The first step is a plan.
void Rows::draw_steps(int number) {
  const Shares shares = shares_of(kind_.name);
  const bool is_many = kind_.name == "many";
  std::vector<int> plans;  // those that can be used
  while (num_steps() < number) {
    const bool is_plan_next = plans.empty() || (is_many && num_steps() < 2);
    const int what = is_plan_next ? 0 : is_many ? 3 * (num_steps() - 1) : between(0, 9);
    if (what >= shares.plans) {
      const bool is_dispatch = what < shares.plans + shares.dispatches;
      draw_step(is_dispatch ? Step::kDispatch : Step::kCombine, plans[emu::draw(plans.size())]);
      continue;
    }
    const int plan = static_cast<int>(routings_.size());
    const bool is_bad = is_many ? num_steps() == 0 : between(0, 1) == 0;
    routings_.push_back(draw_routing(sizes, is_bad ? shares.bad_assignments : 0));
    if (!routings_.back().is_refused()) plans.push_back(plan);
    draw_step(Step::kPlan, plan);
  }
}

void Rows::draw_step(Step::What what, int plan) {
  const bool is_many = kind_.name == "many";
  Step& step = steps_.emplace_back(Step{what, plan});
  step.row_bytes = std::min(sizes.max_row_bytes, 16 * one_of({1, 3, 16, 65, 128, 129, 256, 384}));
  step.dtype = Numbers::of_any_dtype().dtype();
  step.phases = between(1, is_many ? 2 : kPhases);
  step.sms = std::max(min_ctas(sizes.ranks), between(min_ctas(1), kSms));
  step.has_weights = between(0, 1) == 1;
}

void Rows::run(int rank, int step) {
  if (steps_[step].what == Step::kPlan) return plan(rank, step);
  if (!ranks_[rank].plans[steps_[step].plan].is_made) return;
  steps_[step].what == Step::kDispatch ? dispatch(rank, step) : combine(rank, step);
}

// Another call has another phase, dtype, length of rows or presence of weights, or a bit of the
// plan's number differs; another plan has another top-k, alignment or limit.
std::uint64_t Rows::call_of(int number, bool differs) const {
  const Step& step = steps_[number];
  const Routing& routing = routings_[step.plan];
  const int other = differs ? other_ : -1;
  if (step.what == Step::kPlan) {
    const int field = other < 0 ? other : other % 3;
    return call_of_plan(routing.top_k + (field == 0), routing.alignment << (field == 1),
                        routing.limit + (field == 2));
  }
  const bool is_dispatch = (step.what == Step::kDispatch) != (other == 0);
  const std::uint64_t plan = sizes.starts.numbers_of_plans + step.plan;
  return call_of_rows(is_dispatch ? Phase::kDispatch : Phase::kCombine,
                      other < 4 ? plan : plan ^ 1 << (other - 4),
                      other == 1 ? ncclepUint8 : step.dtype, step.row_bytes + 16 * (other == 2),
                      step.has_weights != (other == 3));
}

void Rows::dispatch(int rank, int number) {
  const Step& step = steps_[number];
  const Routing& routing = routings_[step.plan];
  Plan& plan = ranks_[rank].plans[step.plan];
  const Numbers numbers(step.dtype);
  const int num_tokens = routing.num_tokens[rank], top_k = routing.top_k;
  const int hidden = step.row_bytes / numbers.size();
  const std::int64_t num_rows = routing.room_of(rank);
  Memory x(std::size_t{1} * num_tokens * step.row_bytes, 0), w(4 * num_tokens * top_k, 0);
  Memory rows(num_rows * step.row_bytes, kGarbage), row_w(4 * num_rows, kGarbage);
  numbers.put(x.data<char>(), num_tokens * hidden,
              [&](int i) { return value(number, rank, i / hidden, i % hidden); });
  kWeights.put(w.data<char>(), num_tokens * top_k, [&](int i) { return weight(number, rank, i); });

  Dispatch job{};
  job.x = x.data<char>();
  job.w = w.data<float>();
  job.rows = rows.data<char>();
  job.row_w = row_w.data<float>();
  job.has_weights = step.has_weights;
  job.num_tokens = num_tokens;
  job.most_tokens = routing.most_chunks() * kChunk;
  job.top_k = top_k;
  job.row_bytes = step.row_bytes;
  job.num_phases = step.phases;
  job.num_rows = num_rows;
  job.leaves_unused = routing.limit == 0 || number % 2 == 1;
  job.tokens_per_expert = plan.counts->data<std::int64_t>();
  job.routed_per_expert = job.tokens_per_expert + sizes.local;
  job.token_ranks = token_routes_of(plan, num_tokens).token_ranks;
  job.routes = plan.received;
  job.rail_routes = plan.rail_routes;
  const KernelContext ctx = context(rank, call_of(number, rank == differing));
  const int sms = between(min_ctas(1), kind_.name == "many" ? 3 : kSms);
  const std::uint64_t dispatches = states[rank].dispatches;
  launch(rank, [&] { ncclep::native::dispatch(ctx, job, sms, rank, rails(rank)); });

  if (has_failed(rank)) {
    require_nan(rows, "dispatch: rows", rank);
    if (step.has_weights) require_nan(row_w, "dispatch: weights", rank);
    return;
  }
  const int tokens = ctx.control.round_tokens(),
            most = num_chunks_of(routing.most_tokens()) * kChunk;
  const std::uint64_t rounds = sizes.domains == 1 ? 1 : std::max(1, (most + tokens - 1) / tokens);
  require(states[rank].dispatches - dispatches == rounds, "dispatch: rounds of rank ", rank);
  std::vector<std::pair<int, int>> origin(num_rows, {-1, 0});  // rank, and index there
  for (const Pair& pair : routing.pairs[rank]) {
    for (const Assignment& assignment : pair.assignments) {
      if (assignment.slot >= 0) origin[assignment.slot] = {pair.source, assignment.index};
    }
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const int source = origin[row].first, index = origin[row].second;
    const char* found = rows.data<char>() + row * step.row_bytes;
    if (job.leaves_unused && row >= routing.num_rows[rank]) {
      require(std::all_of(found, found + step.row_bytes, [](char c) { return c == kGarbage; }),
              "dispatch: unused row ", row, " of rank ", rank, " is written");
    } else {
      numbers.expect(
          found, hidden,
          [&](int i) { return source < 0 ? 0 : value(number, source, index / top_k, i); },
          "dispatch: row ", row, " of rank ", rank, ", from rank ", source);
    }
    if (!step.has_weights) continue;
    kWeights.expect(
        row_w.data<char>() + 4 * row, 1,
        [&](int) { return source < 0 ? 0 : weight(number, source, index); }, "dispatch: weight ",
        row, " of rank ", rank, ", from rank ", source);
  }
}

void Rows::combine(int rank, int number) {
  const Step& step = steps_[number];
  const Routing& routing = routings_[step.plan];
  Plan& plan = ranks_[rank].plans[step.plan];
  const Numbers numbers(step.dtype);
  const int num_tokens = routing.num_tokens[rank], top_k = routing.top_k;
  const int hidden = step.row_bytes / numbers.size();
  const std::int64_t num_rows = routing.room_of(rank);
  Memory y(num_rows * step.row_bytes, kGarbage), w(4 * num_rows, kGarbage);
  Memory out(std::size_t{1} * num_tokens * step.row_bytes, kGarbage);
  Memory topk_w(4 * num_tokens * top_k, kGarbage);
  numbers.put(y.data<char>(), num_rows * hidden,
              [&](int i) { return value(number, rank, i / hidden, i % hidden); });
  kWeights.put(w.data<char>(), num_rows, [&](int row) { return weight(number, rank, row); });
  const auto split = split_combine(step.sms, sizes.ranks, top_k, step.row_bytes, sizes.domains);
  Memory sums(split.sending > 0 ? plan.received.max_pairs * step.row_bytes : 0, kGarbage);

  Combine job{};
  job.y = y.data<char>();
  job.sums = sums.data<char>();
  job.w = w.data<float>();
  job.out = out.data<char>();
  job.topk_w = topk_w.data<float>();
  job.has_weights = step.has_weights;
  job.dtype = step.dtype;
  job.num_tokens = num_tokens;
  job.top_k = top_k;
  job.row_bytes = step.row_bytes;
  job.token_routes = token_routes_of(plan, num_tokens);
  job.routes = plan.received;
  if (sizes.domains > 1) {
    job.most_tokens = routing.most_chunks() * kChunk;
    job.num_phases = step.phases;
    job.rail_routes = plan.rail_routes;
  }
  const KernelContext ctx = context(rank, call_of(number, rank == differing));
  launch(rank, [&] { ncclep::native::combine(ctx, job, step.sms, rank, rails(rank)); });

  if (has_failed(rank)) {
    require_nan(out, "combine: tokens", rank);
    if (step.has_weights) require_nan(topk_w, "combine: weights", rank);
    return;
  }
  std::vector<float> weights(num_tokens * top_k, 0);
  const auto sum = [&](int expert_rank, const Pair& pair, int i) {
    float part = 0;
    for (const Assignment& assignment : pair.assignments) {
      if (assignment.slot < 0) continue;
      if (i == 0) weights[assignment.index] = weight(number, expert_rank, assignment.slot);
      part += numbers.round(value(number, expert_rank, assignment.slot, i));
    }
    return part;
  };
  const std::vector<float> total = combined(routing, rank, hidden, numbers, sum);
  for (int token = 0; token < num_tokens; ++token) {
    numbers.expect(
        out.data<char>() + token * step.row_bytes, hidden,
        [&](int i) { return total[token * hidden + i]; }, "combine: token ", token, " of rank ",
        rank);
  }
  if (!step.has_weights) return;
  kWeights.expect(
      topk_w.data<char>(), weights.size(), [&](int i) { return weights[i]; },
      "combine: weights of rank ", rank);
}

// --- failures ------------------------------------------------------------------------------------

int Rows::last_kernel() const { return (kind_.name == "calls" ? 1 : 2) * num_steps(); }

bool Rows::is_agreed(int step) const {
  return steps_[step].what == Step::kPlan && routings_[steps_[step].plan].limit == 0;
}

// In a combine the warp that compares the calls has sums to make, too.
// Across domains a rank waits for the rank it wants and for the one that passes its words on.
bool Rows::waits_for_one_thing(int step) const {
  return steps_[step].what != Step::kCombine && sizes.domains == 1;
}

// In the last plan the others may have all that they need; a step on which hosts agree compares
// nothing.
bool Rows::may_go_on(Failing how, int step, bool) const {
  if (step == num_steps() - 1) return true;
  if (how != Failing::kDiffers) return false;
  while (++step < num_steps() && is_agreed(step)) continue;
  return step == num_steps();
}

void Rows::check_failure(int rank, int number, Failing how, int victim) {
  const Step& step = steps_[number];
  const Mailbox& mailbox = mailboxes[rank];
  const auto phase = static_cast<Phase>(mailbox.failed_phase);
  const auto reason = static_cast<Reason>(mailbox.failed_reason);
  require(step.what == Step::kDispatch  ? phase == Phase::kDispatch
          : step.what == Step::kCombine ? phase == Phase::kCombine
                                        : phase == Phase::kPlan || phase == Phase::kRoutes,
          "failure: rank ", rank, " names phase ", mailbox.failed_phase, " in step ", number);
  // A plan is up to three kernels, each an operation.  A plan's errors named the plan, or what a
  // barrier counts.
  const std::uint64_t kernels = step.what == Step::kPlan ? 3 : 1;
  require(states[rank].epoch + 1 - mailbox.failed_epoch <= kernels, "failure: rank ", rank,
          " names operation ", mailbox.failed_epoch, " after ", states[rank].epoch);
  if (how == Failing::kRefuses) {
    require(reason == Reason::kRefused && mailbox.failed_peer == victim, "failure: rank ", rank,
            " does not say that rank ", victim, " refused");
  } else if (how == Failing::kDiffers) {
    const bool is_right = mailbox.failed_peer == victim || rank == victim;
    require(reason == Reason::kDiffers && is_right, "failure: rank ", rank,
            " does not say that rank ", victim, " is in another call");
    for (const bool is_peer : {false, true}) {
      const int whose = is_peer ? mailbox.failed_peer : rank;
      require(mailbox.failed_calls[is_peer] == call_of(number, whose == victim), "failure: rank ",
              rank, " names another call of rank ", whose);
    }
  } else {
    require(reason == Reason::kLate, "failure: rank ", rank, " does not say that it waited");
    const bool may_enter = mailbox.failed_peer != victim || how != Failing::kStops;
    require(may_enter || mailbox.failed_calls[1] == 0, "failure: rank ", rank, " says that rank ",
            victim, " came");
  }
}
