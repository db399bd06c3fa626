// Plans in a sequence: what a host queues for one, and what its kernels must write.
#include "native/plan/plan.h"

#include <algorithm>

#include "native/plan/overflow.h"
#include "rows.h"

using namespace ncclep::native;
using emu::between;

// At a multiple of 16 bytes, or not.
void Rows::put_indices(Plan& plan, const Routing& routing, int rank) {
  const auto& named = routing.named[rank];
  const std::size_t start = between(0, 1), size = routing.is_int64 ? 8 : 4;
  plan.named.emplace(size * (start + named.size()), kGarbage);
  plan.indices = plan.named->data<char>() + size * start;
  for (std::size_t i = 0; i < named.size(); ++i) {
    std::memcpy(plan.indices + size * i, &named[i], size);  // little-endian
  }
}

// With too little room at first, now and then, as the host may guess.
void Rows::plan(int rank, int number) {
  const Routing& routing = routings_[steps_[number].plan];
  OfRank& mine = ranks_[rank];
  Plan& plan = mine.plans[steps_[number].plan];
  const int top_k = routing.top_k, num_tokens = routing.num_tokens[rank];
  const int local = sizes.local, sms = between(1, sizes.ranks > 40 ? 2 : kSms);
  const bool is_static = routing.limit > 0, drops = is_static && routing.may_drop;
  put_indices(plan, routing, rank);
  plan.counts.emplace(8 * (2 * local + 1), kGarbage);
  KernelContext ctx = context(rank, is_static ? call_of(number, rank == differing) : 0);
  plan.token_routes.emplace(4 * TokenRoutes::rows(ctx.control) * num_tokens, kGarbage);
  Memory scratch(4 * PlanScratch::size(ctx.control, kSms), kGarbage);
  Memory kept(4 * num_tokens * top_k, kGarbage);
  const PlanScratch parts(scratch.data<std::int32_t>(), ctx.control, kSms);

  PlanCount job{};
  job.topk_idx = plan.indices;
  job.is_int64 = routing.is_int64;
  job.num_tokens = num_tokens;
  job.top_k = top_k;
  job.most_chunks = routing.most_chunks();
  job.alignment = routing.alignment;
  job.is_static = is_static;
  job.has_dropped = drops;
  if (!is_static && ++mine.ticket == 0) ++mine.ticket;  // as the host does: 0 is no ticket
  job.ticket = is_static ? 0 : mine.ticket;
  job.tokens_per_expert = plan.counts->data<std::int64_t>();
  job.routed_per_expert = job.tokens_per_expert + local;
  job.num_dropped = job.routed_per_expert + local;
  job.token_routes = token_routes_of(plan, num_tokens);
  std::int64_t most_pairs = sizes.ranks * routing.most_tokens();
  std::int64_t most_assignments = most_pairs * std::min(top_k, local);
  if (is_static) {
    most_assignments = std::min(most_assignments, routing.limit);
    most_pairs = std::min(most_pairs, most_assignments);
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
    drop.num_requested = job.num_dropped;
    launch(rank, [&] { drop_what_does_not_fit(ctx, drop, parts, sms, rank, rails(rank)); });
    ctx.call = 0;  // the first kernel has compared it
    job.topk_idx = drop.kept;
    job.is_int64 = false;
  }
  if (sizes.domains > 1) put_rail_routes(plan, routing, rank, &job);
  launch(rank, [&] { plan_count(ctx, job, parts, sms, rank, rails(rank)); });
  // The host would raise; or, if it need not wait, go on.
  const bool has_counted = !has_failed(rank);
  if (!has_counted) {
    require(plan.counts->is_filled_with(0), "plan: rows of rank ", rank, " after a failure");
    if (!is_static) return;
  }
  if (!is_static) {
    check_mailbox(routing, rank);
    most_pairs = static_cast<std::uint32_t>(mailboxes[rank].sizes[1]);
    most_assignments = static_cast<std::uint32_t>(mailboxes[rank].sizes[2]);
    if (most_pairs > 0 && between(0, 2) == 0) {
      receive(plan, routing, rank, most_pairs - 1, most_assignments, parts, sms);
    }
  } else if (has_counted) {
    mine.bad_ranks.insert(routing.bad_ranks.begin(), routing.bad_ranks.end());
    require(ranks_in(mailboxes[rank].bad_ranks) == mine.bad_ranks,
            "plan: bad ranks of static plans");
  }
  receive(plan, routing, rank, most_pairs, most_assignments, parts, sms);
  plan.is_made = !routing.is_refused();
  if (plan.is_made && !has_failed(rank)) {
    check_routes(plan, routing, rank);
    if (sizes.domains > 1) check_rail_routes(plan, routing, rank);
  }
  if (has_counted) check_counts(plan, routing, rank);
}

void Rows::receive(Plan& plan, const Routing& routing, int rank, std::int64_t pairs,
                   std::int64_t assignments, const PlanScratch& scratch, int sms) {
  const int chunks = routing.most_chunks();
  plan.routes.emplace(4 * ReceivedRoutes::size(sizes.ranks, chunks, pairs, assignments), kGarbage);
  plan.received = ReceivedRoutes::in(plan.routes->data<std::int32_t>(), sizes.ranks, chunks, pairs,
                                     assignments);
  launch(rank,
         [&] { plan_receive(context(rank), plan.received, scratch, sms, rank, plan.rail_routes); });
}

void Rows::check_mailbox(const Routing& routing, int rank) {
  const Mailbox& mailbox = mailboxes[rank];
  const std::uint64_t ticket = ranks_[rank].ticket;
  for (const std::uint64_t size : mailbox.sizes) {
    require(size >> 32 == ticket, "the mailbox is not this plan's");
  }
  const int first_bad = routing.bad_ranks.empty() ? -1 : *routing.bad_ranks.begin();
  require(static_cast<int>(mailbox.sizes[3]) - 1 == first_bad, "plan: the first bad rank");
  require(static_cast<int>(mailbox.sizes[0]) == routing.num_rows[rank], "plan: rows");
  for (int i = 0; i < sizes.local; ++i) {
    require(mailbox.rows_of_expert[i] == (ticket << 32 | routing.padded[rank][i]),
            "plan: rows of expert ", i, " in the mailbox");
  }
}

void Rows::check_counts(Plan& plan, const Routing& routing, int rank) {
  const auto* counts = plan.counts->data<std::int64_t>();
  for (int i = 0; i < sizes.local; ++i) {
    require(
        counts[i] == routing.padded[rank][i] && counts[sizes.local + i] == routing.routed[rank][i],
        "plan: the block of expert ", i, " of rank ", rank);
  }
  require(counts[2 * sizes.local] == routing.num_dropped[rank], "plan: dropped assignments");
}

void Rows::check_routes(const Plan& plan, const Routing& routing, int rank) {
  const ReceivedRoutes& routes = plan.received;
  const int chunks = routing.most_chunks();
  // By source: the pairs before each chunk of its tokens.
  std::vector<std::vector<int>> before(sizes.ranks, std::vector<int>(chunks + 1, 0));
  int num_pairs = 0, num_assignments = 0;
  for (const Pair& pair : routing.pairs[rank]) {
    const int first = num_assignments;
    for (const Assignment& assignment : pair.assignments) {
      if (assignment.slot < 0) continue;
      require(routes.assignment_slot[num_assignments] == assignment.slot &&
                  routes.assignment_index[num_assignments] == assignment.index,
              "plan: assignment ", num_assignments, " on rank ", rank, ", of rank ", pair.source);
      ++num_assignments;
    }
    if (num_assignments == first) continue;
    require(routes.pair_token[num_pairs] == pair.name && routes.pair_first[num_pairs] == first,
            "plan: pair ", num_pairs, " on rank ", rank, ", of rank ", pair.source);
    ++num_pairs;
    ++before[pair.source][pair.name / kChunk + 1];
  }
  require(routes.first_pair[sizes.ranks] == num_pairs &&
              routes.pair_first[num_pairs] == num_assignments,
          "plan: end of the routes");
  int pair = 0;
  for (int source = 0; source < sizes.ranks; ++source) {
    require(routes.first_pair[source] == pair, "plan: first pair of rank ", source);
    for (int chunk = 0; chunk <= chunks; ++chunk) {
      pair += before[source][chunk];
      require(routes.chunk_pair[source * (chunks + 1) + chunk] == pair,
              "plan: first pair of a chunk of rank ", source);
    }
  }
}
