// Step 1, plan: from each token's experts to the routes of its rows.
//
// Two kernels.  `count` gives every assignment its index among this rank's assignments for the same
// expert, writes the routes for each other rank into this rank's control window, and posts to each
// of them how many there are; the host reads from the mailbox how many rows this rank will receive.
// `receive` waits until the others have done the same and copies the routes they wrote for this
// rank, with indices turned into slots, into the plan's own memory.  The host queues both before it
// knows how large that memory must be, and queues `receive` again if it was too small.
//
// In static mode the host does not wait; `drop` (overflow.h) runs first where there may be more
// rows than there is room for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/rail_layout.h"
#include "native/state.h"

namespace ncclep::native {

// The source rank's routes of its own tokens.
struct TokenRoutes {
  // The ranks of this domain that have rows of the token, as a RankSet of G words: [T, G].
  std::uint32_t* token_ranks;
  std::uint32_t* token_assignments;  // [T]: assignments that have a slot, one bit each
  std::uint32_t* own_assignments;    // [T]: assignments that stay on this rank, one bit each
  std::int32_t* own_first;           // [T]: the first of them, among all assignments that stay here

  // The four in `memory`, int32 [rows(...), T].
  static TokenRoutes in(std::int32_t* memory, const Control& control, std::int64_t num_tokens) {
    auto* first = reinterpret_cast<std::uint32_t*>(memory);
    const std::int64_t then = control.rank_groups() * num_tokens;
    return {first, first + then, first + then + num_tokens, memory + then + 2 * num_tokens};
  }
  static int rows(const Control& control) { return control.rank_groups() + 3; }
};

// The routes of the rows that arrive here, by source rank and token.  In static mode the arrays are
// larger than needed.
struct ReceivedRoutes {
  int num_chunks;  // of the rank with the most tokens
  std::int32_t*
      first_pair;  // [R + 1]: pairs of source r are first_pair[r] to first_pair[r + 1] - 1
  std::int32_t* chunk_pair;  // [R, num_chunks + 1]: first pair of each chunk of source r's tokens
  std::int32_t* pair_token;  // [pairs]
  std::int32_t* pair_first;  // [pairs + 1]: its assignments, in ascending order of local experts
  std::int32_t* assignment_slot;            // [assignments]
  std::int32_t* assignment_index;           // [assignments]: token * K + k at the source rank
  std::int64_t max_pairs, max_assignments;  // capacity

  // All of them in `memory`, int32 [size(...)].
  static ReceivedRoutes in(std::int32_t* memory, int num_ranks, int num_chunks,
                           std::int64_t max_pairs, std::int64_t max_assignments) {
    ReceivedRoutes parts;
    parts.num_chunks = num_chunks;
    parts.first_pair = memory;
    parts.chunk_pair = parts.first_pair + num_ranks + 1;
    parts.pair_token = parts.chunk_pair + num_ranks * (num_chunks + 1);
    parts.pair_first = parts.pair_token + max_pairs;
    parts.assignment_slot = parts.pair_first + max_pairs + 1;
    parts.assignment_index = parts.assignment_slot + max_assignments;
    parts.max_pairs = max_pairs;
    parts.max_assignments = max_assignments;
    return parts;
  }
  static std::int64_t size(int num_ranks, int num_chunks, std::int64_t max_pairs,
                           std::int64_t max_assignments) {
    return num_ranks + 1 + num_ranks * (num_chunks + 1) + 2 * max_pairs + 1 + 2 * max_assignments;
  }
};

// What a plan has for the other NVLink domains; null where there is one (rail_layout.h).  T tokens
// of this rank, S of any rank, in C chunks; in static mode S and C are upper bounds.
struct RailRoutes {
  // Of this rank's node tokens for each domain:
  std::int32_t* sent_before;        // [D, C + 1]: their number before each chunk of tokens
  std::int32_t* node_of;            // [D, T]: a token's index among them; -1: it is none
  std::int32_t* token_of;           // [D, T]: the tokens with these indices
  std::uint32_t* sent_assignments;  // [D, T]: a token's assignments in the domain, one bit each
  std::int32_t* most_chunks;        // [1]: of tokens, of the rank with the most in this batch
  // Of those that ranks of other domains have for this one:
  std::int32_t* before;  // [R, C + 1]: their number before each chunk of tokens
  // Of those of rail peers, by name:
  std::uint32_t* ranks_of;  // [D, S, G]: ranks that have rows of it, as a RankSet
  std::int32_t* own_pair;   // [D, S]: its pair on this rank, if it has one
  int num_tokens = 0, most_tokens = 0;

  // All of them in `memory`, int32 [size(...)].
  static RailRoutes in(std::int32_t* memory, const Control& control, int num_tokens,
                       int num_chunks) {
    const std::int64_t domains = control.num_domains, mine = domains * num_tokens;
    RailRoutes parts;
    parts.num_tokens = num_tokens;
    parts.most_tokens = num_chunks * kChunk;
    parts.most_chunks = memory;
    parts.sent_before = memory + 1;
    parts.node_of = parts.sent_before + domains * (num_chunks + 1);
    parts.token_of = parts.node_of + mine;
    parts.sent_assignments = reinterpret_cast<std::uint32_t*>(parts.token_of + mine);
    parts.before = parts.token_of + 2 * mine;
    parts.own_pair = parts.before + std::int64_t{control.num_ranks} * (num_chunks + 1);
    parts.ranks_of = reinterpret_cast<std::uint32_t*>(parts.own_pair + domains * parts.most_tokens);
    return parts;
  }
  static std::int64_t size(const Control& control, int num_tokens, int num_chunks) {
    return 1 + std::int64_t{control.num_domains + control.num_ranks} * (num_chunks + 1) +
           std::int64_t{control.num_domains} *
               (3 * num_tokens + (1 + control.rank_groups()) * num_chunks * kChunk);
  }

  NCCLEP_BOTH int num_chunks() const { return most_tokens / kChunk; }
  // Node tokens of this rank for `domain`, and of `source` for this one, before the chunk that
  // begins at `token`.
  NCCLEP_BOTH int num_sent(int domain, int token) const {
    return sent_before[domain * (num_chunks() + 1) + token / kChunk];
  }
  NCCLEP_BOTH int num_before(int source, int token) const {
    return before[source * (num_chunks() + 1) + token / kChunk];
  }
};

// Scratch of a plan, from its first kernel to its last.  Plans of a group run one after the other
// and share it.
struct PlanScratch {
  std::int32_t* parts;       // [CTAs, columns + 1]: each CTA's counts (chunks.cuh)
  std::int32_t* start;       // [R, experts of this rank]: slot of each source's first assignment
  std::int32_t* first_pair;  // [R + 1]
  std::int32_t* first_assignment;  // [R + 1]
  std::int32_t* is_refused;        // [1]: some rank's routing is bad; the host knows and will raise
  std::int32_t* totals;            // [columns + 1]: of this rank; with several domains only

  PlanScratch(std::int32_t* memory, const Control& control, int max_ctas)
      : parts(memory),
        start(parts + max_ctas * part_size(control)),
        first_pair(start + control.num_experts),
        first_assignment(first_pair + control.num_ranks + 1),
        is_refused(first_assignment + control.num_ranks + 1),
        totals(is_refused + 1) {}
  static std::int64_t size(const Control& control, int max_ctas) {
    const int experts = control.num_experts, ranks = control.num_ranks;
    return (max_ctas + 1) * part_size(control) + experts + 2 * (ranks + 1) + 1;
  }

 private:
  static std::int64_t part_size(const Control& control) {
    return control.num_experts + control.num_ranks + control.num_domains + 1;
  }
};

struct PlanCount {
  const void* topk_idx;  // [T, K], int64 or int32
  bool is_int64;
  int num_tokens, top_k;
  int most_chunks;  // of the rank with the most tokens
  int alignment;
  bool is_static;
  bool has_dropped;                 // on entry `num_dropped` holds the assignments before dropping
  std::uint32_t ticket;             // the host waits for it in the mailbox; 0: it does not wait
  std::int64_t* tokens_per_expert;  // [experts of this rank]
  std::int64_t* routed_per_expert;  // [experts of this rank]
  std::int64_t* num_dropped;        // [1]
  TokenRoutes token_routes;
  RailRoutes rail_routes{};  // with several domains
};

// The most shared memory of a CTA of plan's kernels, in bytes; see common/launch.h.
template <int kGroups>
[[gnu::visibility("hidden")]] std::size_t plan_shared_bytes();

// Queues `count`.  Collective.  `rails` are null unless there are several domains.
template <int kGroups>
void plan_count(const KernelContextOf<kGroups>& ctx, const PlanCount& arguments,
                const PlanScratch& scratch, int num_sms, std::uintptr_t stream,
                const Rails* rails = nullptr);

// Queues `receive`, with the scratch of `count`.  It does nothing when the memory is too small (it
// can then be queued again with more), or when the plan is refused, which is the case on all ranks.
template <int kGroups>
void plan_receive(const KernelContextOf<kGroups>& ctx, const ReceivedRoutes& routes,
                  const PlanScratch& scratch, int num_sms, std::uintptr_t stream,
                  const RailRoutes& rail_routes = {});

}  // namespace ncclep::native
