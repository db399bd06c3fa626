// The part of a control window that only groups of several NVLink domains have.
//
// The *rail peer* of a rank in another domain is the one with its local rank there; a *rail* is
// all ranks with one local rank.  Only rail peers use the network between them.  What a rank puts
// to a rail peer is for the ranks of that domain, who find it in the rail peer's window: so a rank
// of another domain is one more source, whose window is that of its rail peer.
//
// A *node token* is a token that has assignments in another domain.  There it is known by its chunk
// and its index among the chunk's tokens for that domain: its *name* is chunk * kChunk + index.
// Rows of node tokens lie one after the other.
//
// Letters as in state.h; D domains of L ranks.  `[d]` is for, or of, the rail peer in domain d.
#pragma once

#include <algorithm>

#include "native/state.h"

namespace ncclep::native {

// What kernels use the network through (device/rails.cuh).
struct Rails;

template <int kGroups>
struct RailLayoutOf {
  Control control;

  NCCLEP_BOTH int num_domains() const { return control.num_domains; }
  NCCLEP_BOTH int local_ranks() const { return control.local_ranks(); }
  // Words of a rank's counts for one domain: for each of its ranks those of Control::counts.
  NCCLEP_BOTH int num_counts() const { return local_ranks() * (control.num_local() + 1); }
  NCCLEP_BOTH std::size_t tokens() const {
    return static_cast<std::size_t>(num_domains()) * control.max_tokens;
  }

  NCCLEP_BOTH std::size_t start() const { return (control.num_bytes() + 15) / 16 * 16; }
  // uint64 [2]: this rank's entry, on its way; two, for consecutive calls.
  NCCLEP_BOTH std::size_t sent_entry() const { return start(); }
  // uint64 [1]: what this rank puts into Control::stop.
  NCCLEP_BOTH std::size_t sent_stop() const { return sent_entry() + 2 * 8; }
  // uint64 [2][D]: entries of rail peers.
  NCCLEP_BOTH std::size_t entries() const { return sent_stop() + 8; }
  // uint64 [D][counts], on their way and there.
  NCCLEP_BOTH std::size_t sent_counts() const { return entries() + 2 * num_domains() * 8; }
  NCCLEP_BOTH std::size_t counts() const { return sent_counts() + counts_bytes(); }
  // uint64 [D][L][chunks]: epoch of the combine whose sums for a chunk of node tokens that local
  // rank has pushed.
  NCCLEP_BOTH std::size_t pushed() const { return counts() + counts_bytes(); }
  // uint64 [2][L][rounds]: epoch of the dispatch, or combine, of which that local rank is
  // done with a round: it has pulled the rows, or added up the sums of ranks (rails/rounds.cuh).
  NCCLEP_BOTH std::size_t rounds_over() const {
    return pushed() + std::size_t{8} * num_domains() * local_ranks() * control.max_chunks();
  }
  // AssignmentRoute [D][L][T * K] and PairRoute [D][L][T], for the ranks of this domain to fetch.
  NCCLEP_BOTH std::size_t assignment_routes() const {
    return rounds_over() + std::size_t{2} * local_ranks() * control.num_rounds * 8;
  }
  NCCLEP_BOTH std::size_t pair_routes() const {
    return assignment_routes() +
           num_domains() * local_ranks() * control.assignments() * sizeof(AssignmentRoute);
  }
  // On their way and there, for each domain: int32 [plan's chunks + 1], the node tokens before each
  // chunk; then uint32 [T, groups], the ranks of the domain that have rows of the node token
  // with this name, as a RankSet.
  NCCLEP_BOTH std::size_t sent_nodes(int domain) const {
    return pair_routes() + local_ranks() * tokens() * sizeof(PairRoute) + domain * nodes_bytes();
  }
  NCCLEP_BOTH std::size_t nodes(int domain) const { return sent_nodes(num_domains() + domain); }
  // int32 [D][L][chunks + 1], for the ranks of this domain to fetch.
  NCCLEP_BOTH std::size_t chunk_pairs() const { return nodes(num_domains()); }
  // float [D][T * K], on their way and there: what combine returns for assignments of rail peers.
  NCCLEP_BOTH std::size_t sent_values() const {
    return chunk_pairs() +
           static_cast<std::size_t>(num_domains()) * local_ranks() * (control.max_chunks() + 1) * 4;
  }
  NCCLEP_BOTH std::size_t values() const { return sent_values() + values_bytes(); }
  // The next three are used by this rank alone, and 0 between calls: uint32 [2][rounds], the items
  // of a round that warps are done with: rows pulled, or sums of ranks; and sums over domains.
  NCCLEP_BOTH std::size_t num_done() const { return values() + values_bytes(); }
  // uint32 [D][phases of all rounds]: tokens of each domain, this rank's among its own, whose sums
  // of ranks are done.
  NCCLEP_BOTH std::size_t num_summed() const { return num_done() + 2 * control.num_rounds * 4; }
  // uint32 [phases of all rounds]: CTAs that have staged their part of each.  A CTA may be in a
  // later round where nobody needs rows of this one.
  NCCLEP_BOTH std::size_t num_staged() const {
    return num_summed() + std::size_t{4} * num_domains() * control.max_phases();
  }
  NCCLEP_BOTH std::size_t end() const {
    return num_staged() + std::size_t{4} * control.max_phases();
  }

 private:
  NCCLEP_BOTH std::size_t counts_bytes() const {
    return static_cast<std::size_t>(num_domains()) * num_counts() * 8;
  }
  NCCLEP_BOTH std::size_t nodes_bytes() const {
    return std::size_t{4} * (control.max_chunks() + 1 + control.max_tokens * kGroups);
  }
  NCCLEP_BOTH std::size_t values_bytes() const { return num_domains() * control.assignments() * 4; }
};

using RailLayout = RailLayoutOf<kRankGroups>;

// Bytes of a control window.
inline std::size_t control_window_bytes(const Control& control) {
  if (control.num_domains == 1) return control.num_bytes();
  if (control.rank_groups() == 1) return RailLayoutOf<1>{control}.end();
  return RailLayoutOf<kMaxRankGroups>{control}.end();
}

// The number of a domain among all but `own`.
NCCLEP_BOTH inline int number_among_others(int own, int domain) {
  return domain < own ? domain : domain - 1;
}

// Rounds: where rows windows for all tokens would be large, dispatch and combine use them for so
// many tokens of a rank at a time (rails/rounds.cuh).  A node token is in the round of its token.

// Half of the rows window of a rank in domain `own`, for one round of a dispatch: rows that it
// stages for its domain, then node tokens' rows on their way to each other domain, then those that
// each rail peer put here.
struct RailRows {
  std::size_t dispatch_bytes;  // of the half
  int num_domains;

  NCCLEP_BOTH static int num_parts(int num_domains) { return 1 + 2 * (num_domains - 1); }
  NCCLEP_BOTH std::size_t part_bytes() const { return dispatch_bytes / num_parts(num_domains); }
  NCCLEP_BOTH std::size_t sent(int own, int domain) const {
    return (1 + number_among_others(own, domain)) * part_bytes();
  }
  NCCLEP_BOTH std::size_t put(int own, int domain) const {
    return (num_domains + number_among_others(own, domain)) * part_bytes();
  }
};

// The part of a rows window that combine uses, after both halves: sums of ranks for a round of this
// rank's tokens and of node tokens of its rail peers, [domain][token][local rank]; then, for one
// round or for two by turns, domains' sums of node tokens on their way to each rail peer, and
// domains' sums of this rank's tokens, by domain.
struct RailSums {
  std::size_t dispatch_bytes;
  int num_domains, local_ranks, num_rounds;

  NCCLEP_BOTH std::size_t of_ranks(int domain) const { return at(domain * local_ranks); }
  NCCLEP_BOTH std::size_t sent(int round, int own, int domain) const {
    return turn(round) + at(num_ranks() + number_among_others(own, domain));
  }
  NCCLEP_BOTH std::size_t of_domain(int round, int domain) const {
    return turn(round) + at(num_ranks() + num_domains - 1 + domain);
  }
  // In the parts of a RailRows; of a group of one domain a row of each rank for each token.
  NCCLEP_BOTH int num_parts() const {
    if (num_domains == 1) return local_ranks;
    return num_ranks() + (num_rounds > 1 ? 2 : 1) * turn_parts();
  }

 private:
  NCCLEP_BOTH int num_ranks() const { return num_domains * local_ranks; }
  NCCLEP_BOTH int turn_parts() const { return 2 * num_domains - 1; }
  NCCLEP_BOTH std::size_t part_bytes() const {
    return RailRows{dispatch_bytes, num_domains}.part_bytes();
  }
  NCCLEP_BOTH std::size_t at(int part) const { return 2 * dispatch_bytes + part * part_bytes(); }
  NCCLEP_BOTH std::size_t turn(int round) const { return round % 2 * turn_parts() * part_bytes(); }
};

// Bytes of half a rows window, for rows of at most `row_bytes`.
inline std::size_t dispatch_bytes(const Control& control, std::size_t row_bytes) {
  return row_bytes * control.round_tokens() * RailRows::num_parts(control.num_domains);
}

// Bytes of a rows window.
inline std::size_t rows_window_bytes(const Control& control, std::size_t row_bytes) {
  const RailSums sums{0, control.num_domains, control.local_ranks(), control.num_rounds};
  return 2 * dispatch_bytes(control, row_bytes) +
         row_bytes * control.round_tokens() * sums.num_parts();
}

// The fewest rounds with which a rows window has at most `most_bytes`, if there is such a number;
// at most so many that a round is a chunk.
inline int num_rounds_for(Control control, std::size_t row_bytes, std::size_t most_bytes) {
  if (control.num_domains == 1) return 1;
  const int most = std::max(1, control.max_chunks());
  control.num_rounds = 1;
  while (control.num_rounds < most && rows_window_bytes(control, row_bytes) > most_bytes) {
    ++control.num_rounds;
  }
  return control.num_rounds;
}

}  // namespace ncclep::native
