#include "runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "native/device/refusal.h"
#include "native/host/call.h"
#include "native/plan/overflow.h"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/dispatch.h"

using namespace ncclep::native;
using emu::between;

namespace {

// Payload; sums of it depend on their order.
float value(int step, int rank, int row, int i) {
  const unsigned int mixed = (step * 7919u + rank * 1009u + row * 131u + i * 17u) * 2654435761u;
  return (static_cast<int>(mixed >> 8) - (1 << 23)) / static_cast<float>((1 + mixed % 997) << 14);
}

float weight(int step, int rank, int i) { return value(step + 1'000'000, rank, i, 0); }

const Numbers kWeights(ncclep::DType::kFloat32);

void require_nan(Memory& memory, const char* what, int rank) {
  require(memory.is(0xff), what, " of rank ", rank, ", whose group has failed: not all NaN");
}

}  // namespace

// --- the memory of all ranks ---------------------------------------------------------------------

World::World(const Sizes& sizes) : states_(sizes.ranks), mailboxes_(sizes.ranks) {
  shared_.control = {sizes.ranks, sizes.experts(),
                     (sizes.max_tokens + kChunk - 1) / kChunk * kChunk, sizes.max_top_k};
  shared_.dispatch_bytes = std::size_t{1} * sizes.max_row_bytes * shared_.control.max_tokens;
  shared_.deadline_ns = emu::kJump / 2;
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    Memory& control = control_.emplace_back(shared_.control.num_bytes(), 0);
    Memory& rows = rows_.emplace_back(shared_.dispatch_bytes * (2 + sizes.ranks), kGarbage);
    shared_.control_of[rank] = control.data<char>();
    shared_.rows_of[rank] = rows.data<char>();
    State& state = states_[rank];
    std::memset(static_cast<void*>(&state), 0, sizeof(State));
    state.epoch = sizes.starts.operations;
    state.plans = sizes.starts.plans;
    state.dispatches = sizes.starts.dispatches;
    state.entries = sizes.starts.entries;
    emu::add_memory(&state, sizeof(State));
    std::memset(static_cast<void*>(&mailboxes_[rank]), 0, sizeof(Mailbox));
  }
}

World::~World() {
  for (State& state : states_) emu::forget_memory(&state);
}

KernelContext World::of(int rank) const {
  KernelContext me = shared_;
  me.rank = rank;
  me.state = &states_[rank];
  me.mailbox = &mailboxes_[rank];
  return me;
}

std::vector<std::vector<char>> World::windows_but_of(int rank) {
  std::vector<std::vector<char>> copies;
  for (int other = 0; other < shared_.control.num_ranks; ++other) {
    if (other == rank) continue;
    copies.push_back(control_[other].copy());
    copies.push_back(rows_[other].copy());
  }
  return copies;
}

// --- a rank --------------------------------------------------------------------------------------

void Runner::run(const Step& step) {
  if (step.kind == Step::kPlan) return plan(step);
  if (!has_plan(step.plan)) return;
  step.kind == Step::kDispatch ? dispatch(step) : combine(step);
}

void Runner::launch(const std::function<void()>& queue) {
  before_kernel();
  queue();
  emu::synchronize(me_.rank);
}

std::uint64_t Runner::call_of(const Step& step, bool is_other) const {
  const Routing& routing = routings_[step.plan];
  const int other = is_other ? step.other : -1;
  if (step.kind == Step::kPlan) {
    const int field = other < 0 ? other : other % 3;
    return call_of_plan(routing.top_k + (field == 0), routing.alignment << (field == 1),
                        routing.limit + (field == 2));
  }
  const bool is_dispatch = (step.kind == Step::kDispatch) != (other == 0);
  const std::uint64_t plan = sizes_.starts.calls + step.plan;
  return call_of_rows(is_dispatch ? Phase::kDispatch : Phase::kCombine,
                      other < 4 ? plan : plan ^ 1 << (other - 4),
                      other == 1 ? ncclep::DType::kUint8 : step.dtype,
                      step.row_bytes + 16 * (other == 2), step.has_weights != (other == 3));
}

void Runner::refuse() {
  launch([&] { ncclep::native::refuse(me_, Phase::kPlan, me_.rank); });
}

TokenRoutes Runner::token_routes_of(Plan& plan, int num_tokens) {
  return TokenRoutes::in(plan.token_routes->data<std::int32_t>(), num_tokens);
}

void Runner::receive(Plan& plan, const Routing& routing, std::int64_t pairs,
                     std::int64_t assignments, const PlanScratch& scratch, int sms) {
  const int chunks = routing.most_chunks(), ranks = sizes_.ranks;
  plan.routes.emplace(4 * ReceivedRoutes::size(ranks, chunks, pairs, assignments), kGarbage);
  auto* memory = plan.routes->data<std::int32_t>();
  plan.received = ReceivedRoutes::in(memory, ranks, chunks, pairs, assignments);
  launch([&] { plan_receive(me_, plan.received, scratch, sms, me_.rank); });
}

// With too little room at first, now and then, as the host may guess.
void Runner::plan(const Step& step) {
  const Routing& routing = routings_[step.plan];
  const int top_k = routing.top_k, num_tokens = routing.num_tokens[me_.rank];
  const int local = sizes_.local, sms = between(1, kSms);
  const bool is_static = routing.limit > 0, drops = is_static && routing.may_drop;
  Plan& plan = plans_[step.plan];
  const auto& named = routing.named[me_.rank];
  // At a multiple of 16 bytes, or not.
  const std::size_t start = between(0, 1);
  plan.named.emplace((routing.is_int64 ? 8 : 4) * (start + named.size()), kGarbage);
  for (std::size_t i = 0; i < named.size(); ++i) {
    if (routing.is_int64) plan.named->data<std::int64_t>()[start + i] = named[i];
    if (!routing.is_int64) plan.named->data<std::int32_t>()[start + i] = static_cast<int>(named[i]);
  }
  plan.counts.emplace(8 * (2 * local + 1), kGarbage);
  plan.token_routes.emplace(16 * num_tokens, kGarbage);
  Memory scratch(4 * PlanScratch::size(me_.control, kSms), kGarbage);
  Memory kept(4 * num_tokens * top_k, kGarbage);
  const PlanScratch parts(scratch.data<std::int32_t>(), me_.control, kSms);

  PlanCount job{};
  job.topk_idx = plan.named->data<char>() + (routing.is_int64 ? 8 : 4) * start;
  job.is_int64 = routing.is_int64;
  job.num_tokens = num_tokens;
  job.top_k = top_k;
  job.most_chunks = routing.most_chunks();
  job.alignment = routing.alignment;
  job.is_static = is_static;
  job.has_dropped = drops;
  if (!is_static && ++ticket_ == 0) ++ticket_;  // as the host does: 0 is no ticket
  job.ticket = is_static ? 0 : ticket_;
  job.tokens_per_expert = plan.counts->data<std::int64_t>();
  job.routed_per_expert = job.tokens_per_expert + local;
  job.num_dropped = job.routed_per_expert + local;
  job.token_routes = token_routes_of(plan, num_tokens);
  std::int64_t most_pairs = sizes_.ranks * routing.most_tokens();
  std::int64_t most_assignments = most_pairs * std::min(top_k, local);
  if (is_static) {
    most_assignments = std::min(most_assignments, routing.limit);
    most_pairs = std::min(most_pairs, most_assignments);
    me_.call = call_of(step, differs);
  }
  if (drops) {
    Drop drop{};
    drop.topk_idx = job.topk_idx;
    drop.is_int64 = job.is_int64;
    drop.num_tokens = num_tokens;
    drop.top_k = top_k;
    drop.alignment = routing.alignment;
    drop.max_recv_rows = routing.limit;
    drop.kept = kept.data<std::int32_t>();
    drop.num_wanted = job.num_dropped;
    drop.lacked = lacked_.data<std::int64_t>();
    launch([&] { drop_what_does_not_fit(me_, drop, parts, sms, me_.rank); });
    me_.call = 0;  // the first kernel has compared it
    job.topk_idx = drop.kept;
    job.is_int64 = false;
  }
  launch([&] { plan_count(me_, job, parts, sms, me_.rank); });
  me_.call = 0;
  // The host would raise; or, if it need not wait, go on.
  const bool has_counted = !has_failed();
  if (!has_counted)
    require(plan.counts->is(0), "plan: rows of rank ", me_.rank, " after a failure");
  if (!has_counted && !is_static) return;
  if (!is_static) {
    for (const std::uint64_t size : me_.mailbox->sizes) {
      require(size >> 32 == ticket_, "the mailbox is not this plan's");
    }
    require(static_cast<std::uint32_t>(me_.mailbox->sizes[3]) == routing.bad_ranks,
            "plan: bad ranks");
    require(static_cast<int>(me_.mailbox->sizes[0]) == routing.num_rows[me_.rank], "plan: rows");
    for (int i = 0; i < local; ++i) {
      const std::uint64_t rows = me_.mailbox->rows_of_expert[i];
      require(rows == (std::uint64_t{ticket_} << 32 | routing.padded[me_.rank][i]),
              "plan: rows of expert ", i, " in the mailbox");
    }
    most_pairs = static_cast<std::uint32_t>(me_.mailbox->sizes[1]);
    most_assignments = static_cast<std::uint32_t>(me_.mailbox->sizes[2]);
    if (most_pairs > 0 && between(0, 2) == 0) {
      receive(plan, routing, most_pairs - 1, most_assignments, parts, sms);
    }
  } else if (has_counted) {
    bad_ranks_ |= routing.bad_ranks;
    require(me_.mailbox->bad_ranks == bad_ranks_, "plan: bad ranks of static plans");
  }
  receive(plan, routing, most_pairs, most_assignments, parts, sms);
  plan.is_made = !routing.is_refused();
  if (plan.is_made && !has_failed()) check_routes(plan, routing);
  for (int i = 0; i < local && has_counted; ++i) {
    require(job.tokens_per_expert[i] == routing.padded[me_.rank][i] &&
                job.routed_per_expert[i] == routing.routed[me_.rank][i],
            "plan: the block of expert ", i, " of rank ", me_.rank);
  }
  if (has_counted) {
    require(*job.num_dropped == routing.num_dropped[me_.rank], "plan: dropped assignments");
    for (int rank = 0; rank < sizes_.ranks; ++rank) {
      const std::int64_t rows = is_static ? routing.num_needed[rank] - routing.limit : 0;
      std::int64_t& most = most_lacked_[rank];
      most = std::max(most, rows > 0 ? rows << 32 | routing.limit : 0);
      require(lacked_.data<std::int64_t>()[rank] == most, "plan: rows that rank ", rank,
              " lacked so far");
    }
  }
}

void Runner::check_routes(const Plan& plan, const Routing& routing) {
  const ReceivedRoutes& routes = plan.received;
  const int chunks = routing.most_chunks();
  int pair = 0, assignment = 0;
  for (int source = 0; source < sizes_.ranks; ++source) {
    require(routes.first_pair[source] == pair, "plan: first pair of rank ", source);
    for (int token = 0; token < chunks * kChunk; ++token) {
      const int* chunk_pair = routes.chunk_pair + source * (chunks + 1) + token / kChunk;
      require(token % kChunk != 0 || *chunk_pair == pair, "plan: first pair of a chunk of rank ",
              source);
      if (token >= routing.num_tokens[source]) continue;
      std::vector<std::pair<int, int>> assignments;  // expert, and where it is named
      for (int i = token * routing.top_k; i < (token + 1) * routing.top_k; ++i) {
        const int expert = routing.experts[source][i];
        const bool is_here = routing.slots[source][i] >= 0 && expert / sizes_.local == me_.rank;
        if (is_here) assignments.emplace_back(expert, i);
      }
      if (assignments.empty()) continue;
      std::sort(assignments.begin(), assignments.end());
      require(routes.pair_token[pair] == token && routes.pair_first[pair] == assignment,
              "plan: pair ", pair, " on rank ", me_.rank, ", of rank ", source);
      ++pair;
      for (const auto& [expert, i] : assignments) {
        require(routes.assignment_slot[assignment] == routing.slots[source][i] &&
                    routes.assignment_index[assignment] == i,
                "plan: assignment ", assignment, " on rank ", me_.rank, ", of rank ", source);
        ++assignment;
      }
    }
    require(routes.chunk_pair[source * (chunks + 1) + chunks] == pair, "plan: end of rank ",
            source);
  }
  require(routes.first_pair[sizes_.ranks] == pair && routes.pair_first[pair] == assignment,
          "plan: end of the routes");
}

void Runner::dispatch(const Step& step) {
  const Routing& routing = routings_[step.plan];
  Plan& plan = plans_[step.plan];
  const Numbers numbers(step.dtype);
  const int num_tokens = routing.num_tokens[me_.rank], top_k = routing.top_k;
  const int hidden = step.row_bytes / numbers.size();
  const std::int64_t num_rows = routing.room_of(me_.rank);
  Memory x(std::size_t{1} * num_tokens * step.row_bytes, 0), w(4 * num_tokens * top_k, 0);
  Memory rows(num_rows * step.row_bytes, kGarbage), row_w(4 * num_rows, kGarbage);
  for (int i = 0; i < num_tokens * hidden; ++i) {
    numbers.put(x, i, value(step.number, me_.rank, i / hidden, i % hidden));
  }
  for (int i = 0; i < num_tokens * top_k; ++i) {
    kWeights.put(w, i, weight(step.number, me_.rank, i));
  }

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
  job.tokens_per_expert = plan.counts->data<std::int64_t>();
  job.routed_per_expert = job.tokens_per_expert + sizes_.local;
  job.token_ranks = token_routes_of(plan, num_tokens).token_ranks;
  job.routes = plan.received;
  me_.call = call_of(step, differs);
  launch([&] { ncclep::native::dispatch(me_, job, between(min_ctas(1), kSms), me_.rank); });

  if (has_failed()) {
    require_nan(rows, "dispatch: rows", me_.rank);
    if (step.has_weights) require_nan(row_w, "dispatch: weights", me_.rank);
    return;
  }
  std::vector<std::pair<int, int>> origin(num_rows, {-1, 0});  // rank and assignment
  for (int source = 0; source < sizes_.ranks; ++source) {
    for (std::size_t assignment = 0; assignment < routing.slots[source].size(); ++assignment) {
      const int slot = routing.slots[source][assignment];
      const bool is_here =
          slot >= 0 && routing.experts[source][assignment] / sizes_.local == me_.rank;
      if (is_here) origin[slot] = {source, static_cast<int>(assignment)};
    }
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto [source, assignment] = origin[row];
    for (int i = 0; i < hidden; ++i) {
      const float expected = source < 0 ? 0 : value(step.number, source, assignment / top_k, i);
      require(numbers.get(rows, row * hidden + i) == numbers.bits(expected), "dispatch: row ", row,
              " of rank ", me_.rank, ", from rank ", source, ", at number ", i, " of ", hidden);
    }
    const float expected = source < 0 ? 0 : weight(step.number, source, assignment);
    require(!step.has_weights || kWeights.get(row_w, row) == kWeights.bits(expected),
            "dispatch: weight ", row, " of rank ", me_.rank, ", from rank ", source);
  }
}

void Runner::combine(const Step& step) {
  const Routing& routing = routings_[step.plan];
  Plan& plan = plans_[step.plan];
  const Numbers numbers(step.dtype);
  const int num_tokens = routing.num_tokens[me_.rank], top_k = routing.top_k;
  const int hidden = step.row_bytes / numbers.size();
  const std::int64_t num_rows = routing.room_of(me_.rank);
  Memory y(num_rows * step.row_bytes, kGarbage), w(4 * num_rows, kGarbage);
  Memory out(std::size_t{1} * num_tokens * step.row_bytes, kGarbage);
  Memory topk_w(4 * num_tokens * top_k, kGarbage);
  for (int row = 0; row < num_rows; ++row) {
    for (int i = 0; i < hidden; ++i) {
      numbers.put(y, std::size_t{1} * row * hidden + i, value(step.number, me_.rank, row, i));
    }
    kWeights.put(w, row, weight(step.number, me_.rank, row));
  }
  const CombineSplit split = split_combine(step.sms, sizes_.ranks, top_k, step.row_bytes);
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
  me_.call = call_of(step, differs);
  launch([&] { ncclep::native::combine(me_, job, step.sms, me_.rank); });

  if (has_failed()) {
    require_nan(out, "combine: tokens", me_.rank);
    if (step.has_weights) require_nan(topk_w, "combine: weights", me_.rank);
    return;
  }
  for (int token = 0; token < num_tokens; ++token) {
    // Assignments with a row, by expert: so by rank, too.
    std::vector<std::pair<int, int>> assignments;
    for (int assignment = token * top_k; assignment < (token + 1) * top_k; ++assignment) {
      const int slot = routing.slots[me_.rank][assignment];
      const int expert = routing.experts[me_.rank][assignment];
      if (slot >= 0) assignments.emplace_back(expert, slot);
      const float expected = slot < 0 ? 0 : weight(step.number, expert / sizes_.local, slot);
      require(!step.has_weights || kWeights.get(topk_w, assignment) == kWeights.bits(expected),
              "combine: weight of assignment ", assignment, " of rank ", me_.rank);
    }
    std::sort(assignments.begin(), assignments.end());
    for (int i = 0; i < hidden; ++i) {
      float total = 0, part = 0;
      for (std::size_t p = 0; p < assignments.size(); ++p) {
        const int rank = assignments[p].first / sizes_.local;
        part += numbers.round(value(step.number, rank, assignments[p].second, i));
        if (p + 1 < assignments.size() && assignments[p + 1].first / sizes_.local == rank) continue;
        total += rank == me_.rank ? part : numbers.round(part);
        part = 0;
      }
      require(numbers.get(out, std::size_t{1} * token * hidden + i) == numbers.bits(total),
              "combine: token ", token, " of rank ", me_.rank, " at number ", i, " of ", hidden);
    }
  }
}
