// Plans in a sequence: what a host queues for one, and what its kernels must write.
#include "native/plan/plan.h"

#include <algorithm>

#include "native/plan/overflow.h"
#include "rows.h"

using namespace ncclep::native;
using emu::between;

// With too little room at first, now and then, as the host may guess.
void Rows::plan(int rank, int number) {
  const Routing& routing = routings_[steps_[number].plan];
  OfRank& mine = ranks_[rank];
  Plan& plan = mine.plans[steps_[number].plan];
  const int top_k = routing.top_k, num_tokens = routing.num_tokens[rank];
  const int local = sizes.local, sms = between(1, sizes.ranks > 40 ? 2 : kSms);
  const bool is_static = routing.limit > 0, drops = is_static && routing.may_drop;
  // At a multiple of 16 bytes, or not.
  const std::size_t start = between(0, 1) * routing.index_bytes();
  Memory named(start + routing.index_bytes() * num_tokens * top_k, kGarbage);
  char* const indices = named.data<char>() + start;
  routing.put_indices(rank, indices);
  plan.counts.emplace(8 * (2 * local + 1), kGarbage);
  KernelContext ctx = context(rank, is_static ? call_of(number, rank == differing) : 0);
  plan.token_routes.emplace(4 * TokenRoutes::rows(ctx.control) * num_tokens, kGarbage);
  Memory scratch(4 * PlanScratch::size(ctx.control, kSms), kGarbage);
  Memory kept(4 * num_tokens * top_k, kGarbage);
  const PlanScratch parts(scratch.data<std::int32_t>(), ctx.control, kSms);

  PlanCount job{};
  job.topk_idx = indices;
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
  if (sizes.domains > 1) {
    const int chunks = routing.most_chunks();
    plan.rail_memory.emplace(4 * RailRoutes::size(ctx.control, num_tokens, chunks), kGarbage);
    job.rail_routes = plan.rail_routes =
        RailRoutes::in(plan.rail_memory->data<std::int32_t>(), ctx.control, num_tokens, chunks);
  }
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
  const int chunks = routing.most_chunks(), own = sizes.domain_of(rank);
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
    // How this rank knows the token.
    const bool is_node = sizes.domain_of(pair.source) != own;
    const int name =
        is_node ? node_tokens(routing, pair.source, own).at(pair.token).name : pair.token;
    require(routes.pair_token[num_pairs] == name && routes.pair_first[num_pairs] == first,
            "plan: pair ", num_pairs, " on rank ", rank, ", of rank ", pair.source);
    ++num_pairs;
    ++before[pair.source][name / kChunk + 1];
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

std::map<int, Rows::NodeToken> Rows::node_tokens(const Routing& routing, int source,
                                                 int domain) const {
  const int locals = sizes.ranks / sizes.domains;
  std::map<int, NodeToken> nodes;
  for (int local_rank = 0; local_rank < locals; ++local_rank) {
    for (const Pair& pair : routing.pairs[domain * locals + local_rank]) {
      for (const Assignment& assignment : pair.assignments) {
        if (pair.source != source || assignment.slot < 0) continue;
        NodeToken& node = nodes[pair.token];
        node.ranks[local_rank / 32] |= 1u << local_rank % 32;
        node.assignments |= 1u << assignment.index % routing.top_k;
      }
    }
  }
  int name = -1;
  for (auto& [token, node] : nodes) {
    node.name = name = std::max(name + 1, token / kChunk * kChunk);
  }
  return nodes;
}

void Rows::check_rail_routes(const Plan& plan, const Routing& routing, int rank) {
  const RailRoutes& routes = plan.rail_routes;
  const int locals = sizes.ranks / sizes.domains, own = sizes.domain_of(rank);
  const int num_tokens = routing.num_tokens[rank], groups = context(rank).control.rank_groups();
  const auto num_before = [](const std::map<int, NodeToken>& nodes, int token) {
    return static_cast<int>(std::distance(nodes.begin(), nodes.lower_bound(token)));
  };
  for (int domain = 0; domain < sizes.domains; ++domain) {
    if (domain == own) continue;
    // What this rank puts there.
    const auto sent = node_tokens(routing, rank, domain);
    for (int token = 0; token <= routes.most_tokens; ++token) {
      const int number = num_before(sent, token);
      require(token % kChunk != 0 || routes.num_sent(domain, token) == number,
              "plan: node tokens of rank ", rank);
      if (token >= num_tokens) continue;
      const int at = domain * num_tokens;
      const auto node = sent.find(token);
      const bool is_sent = node != sent.end();
      require(routes.sent_assignments[at + token] == (is_sent ? node->second.assignments : 0),
              "plan: assignments of token ", token, " of rank ", rank, " in domain ", domain);
      require(routes.node_of[at + token] == (is_sent ? number : -1), "plan: token ", token,
              " of rank ", rank, " in domain ", domain);
      require(!is_sent || routes.token_of[at + number] == token, "plan: node token ", number,
              " of rank ", rank);
    }
    // What ranks there put here, and its rail peer to this rank.
    for (int source = domain * locals; source < (domain + 1) * locals; ++source) {
      const auto received = node_tokens(routing, source, own);
      for (int token = 0; token <= routes.most_tokens; token += kChunk) {
        require(routes.num_before(source, token) == num_before(received, token),
                "plan: node tokens of rank ", source, " on rank ", rank);
      }
      if (sizes.local_rank_of(source) != sizes.local_rank_of(rank)) continue;
      for (const auto& [token, node] : received) {
        const int at = domain * routes.most_tokens + node.name, local_rank = rank % locals;
        require(std::equal(node.ranks, node.ranks + groups, routes.ranks_of + at * groups),
                "plan: ranks of node token ", node.name, " of rank ", source);
        if (!(node.ranks[local_rank / 32] >> local_rank % 32 & 1)) continue;
        const int pair = routes.own_pair[at];
        require(plan.received.pair_token[pair] == node.name &&
                    pair >= plan.received.first_pair[source] &&
                    pair < plan.received.first_pair[source + 1],
                "plan: the pair of node token ", node.name, " of rank ", source);
      }
    }
  }
}
