// Plans in groups of several domains: what only those have.
#include "rows.h"

using namespace ncclep::native;

// Domains know tokens of others by their order among those of a chunk that have rows there.
void name_node_tokens(const Sizes& sizes, Routing& routing) {
  for (int source = 0; source < sizes.ranks; ++source) {
    for (int domain = 0; domain < sizes.domains; ++domain) {
      std::vector<Pair*> pairs;
      for (int rank = 0; rank < sizes.ranks; ++rank) {
        for (Pair& pair : routing.pairs[rank]) {
          const bool is_between = sizes.domain_of(rank) == domain && pair.source == source;
          if (is_between && pair.num_rows() > 0) pairs.push_back(&pair);
        }
      }
      if (domain == sizes.domain_of(source)) continue;
      std::sort(pairs.begin(), pairs.end(), [](Pair* a, Pair* b) { return a->token < b->token; });
      int name = -1, token = -1;
      for (Pair* pair : pairs) {
        const int chunk = pair->token / kChunk * kChunk;
        if (pair->token != token) name = std::max(name + 1, chunk);
        token = pair->token;
        pair->name = name;
      }
    }
  }
}

void Rows::put_rail_routes(Plan& plan, const Routing& routing, int rank, PlanCount* job) {
  const int num_tokens = routing.num_tokens[rank], chunks = routing.most_chunks();
  const Control control = context(rank).control;
  plan.rail_memory.emplace(4 * RailRoutes::size(control, num_tokens, chunks), kGarbage);
  plan.rail_routes = job->rail_routes =
      RailRoutes::in(plan.rail_memory->data<std::int32_t>(), control, num_tokens, chunks);
}

void Rows::check_rail_routes(const Plan& plan, const Routing& routing, int rank) {
  const RailRoutes& routes = plan.rail_routes;
  const int locals = sizes.ranks / sizes.domains, own = sizes.domain_of(rank);
  const std::size_t groups = context(rank).control.rank_groups();
  const auto ranks_of = [&](int source, int token, int domain) {
    std::vector<std::uint32_t> ranks(groups, 0);
    for (int local_rank = 0; local_rank < locals; ++local_rank) {
      for (const Pair& pair : routing.pairs[domain * locals + local_rank]) {
        if (pair.source == source && pair.token == token && pair.num_rows() > 0) {
          ranks[local_rank / 32] |= 1u << local_rank % 32;
        }
      }
    }
    return ranks;
  };
  const std::vector<std::uint32_t> none(groups, 0);
  for (int domain = 0; domain < sizes.domains; ++domain) {
    if (domain == own) continue;
    // What this rank puts there.
    int node = 0;
    for (int token = 0; token < routes.most_tokens; ++token) {
      if (token % kChunk == 0) {
        require(routes.num_sent(domain, token) == node, "plan: node tokens of rank ", rank);
      }
      if (token >= routing.num_tokens[rank]) continue;
      const int at = domain * routing.num_tokens[rank];
      std::uint32_t assignments = 0;
      for (int local_rank = 0; local_rank < locals; ++local_rank) {
        for (const Pair& pair : routing.pairs[domain * locals + local_rank]) {
          if (pair.source != rank || pair.token != token) continue;
          for (const Assignment& assignment : pair.assignments) {
            if (assignment.slot >= 0) assignments |= 1u << assignment.index % routing.top_k;
          }
        }
      }
      require(routes.sent_assignments[at + token] == assignments, "plan: assignments of token ",
              token, " of rank ", rank, " in domain ", domain);
      require(routes.node_of[at + token] == (assignments == 0 ? -1 : node), "plan: token ", token,
              " of rank ", rank, " in domain ", domain);
      if (assignments == 0) continue;
      require(routes.token_of[at + node] == token, "plan: node token ", node, " of rank ", rank);
      ++node;
    }
    require(routes.num_sent(domain, routes.most_tokens) == node, "plan: node tokens of rank ",
            rank);
    // What the rail peer there puts here.
    const int source = domain * locals + rank % locals;
    const int at = domain * routes.most_tokens;
    int name = 0;
    for (int token = 0; token < routing.num_tokens[source]; ++token) {
      name = token % kChunk == 0 ? token : name;
      const auto ranks = ranks_of(source, token, own);
      if (ranks == none) continue;
      require(std::equal(ranks.begin(), ranks.end(), routes.ranks_of + (at + name) * groups),
              "plan: ranks of node token ", name, " of rank ", source);
      const int local_rank = rank % locals;
      if (ranks[local_rank / 32] >> local_rank % 32 & 1) {
        const int pair = routes.own_pair[at + name];
        require(plan.received.pair_token[pair] == name &&
                    pair >= plan.received.first_pair[source] &&
                    pair < plan.received.first_pair[source + 1],
                "plan: the pair of node token ", name, " of rank ", source);
      }
      ++name;
    }
    // Of all ranks there.
    for (int other = domain * locals; other < (domain + 1) * locals; ++other) {
      int number = 0;
      for (int token = 0; token <= routes.most_tokens; ++token) {
        if (token % kChunk == 0) {
          require(routes.num_before(other, token) == number, "plan: node tokens of rank ", other,
                  " on rank ", rank);
        }
        number += token < routing.num_tokens[other] && ranks_of(other, token, own) != none;
      }
    }
  }
}
