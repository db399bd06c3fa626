// Step 1, plan: from each token's experts to who sends what where.
//
// Two kernels.  `count` gives every assignment its place among this rank's assignments for the same
// expert, writes what each other rank has to know into this rank's control window, and tells each
// of them how much it is; the host learns from the mailbox how many rows this rank will get.
// `receive` waits until the others have done the same and moves what they wrote for this rank,
// places turned into slots, into the plan's own memory.  The host queues both before it knows how
// much room that memory must have, and `receive` once more when it was too little.
//
// In static mode the host waits for nothing; `drop` (overflow.h) comes first where there may be
// more than there is room for.
#pragma once

#include <cstdint>

#include "native/state.h"

namespace ncclep::native {

// What the source rank knows of its own tokens.
struct TokenRoutes {
  std::uint32_t* token_ranks;        // [T]: ranks that have rows of the token, one bit each
  std::uint32_t* token_assignments;  // [T]: assignments that have a slot, one bit each
  std::uint32_t* own_assignments;    // [T]: assignments that stay on this rank, one bit each
  std::int32_t* own_first;           // [T]: the first of them, among all assignments that stay here

  // The four in `memory`, int32 [4, T].
  static TokenRoutes in(std::int32_t* memory, std::int64_t num_tokens) {
    auto* first = reinterpret_cast<std::uint32_t*>(memory);
    return {first, first + num_tokens, first + 2 * num_tokens, memory + 3 * num_tokens};
  }
};

// What arrives here, by source rank and token.  In static mode there is room for more.
struct ReceivedRoutes {
  int num_chunks;  // of the rank with the most tokens
  std::int32_t*
      first_pair;  // [R + 1]: pairs of source r are first_pair[r] to first_pair[r + 1] - 1
  std::int32_t* chunk_pair;  // [R, num_chunks + 1]: first pair of each chunk of source r's tokens
  std::int32_t* pair_token;  // [pairs]
  std::int32_t* pair_first;  // [pairs + 1]: its assignments, in ascending order of local experts
  std::int32_t* assignment_slot;            // [assignments]
  std::int32_t* assignment_index;           // [assignments]: token * K + k at the source rank
  std::int64_t max_pairs, max_assignments;  // that there is room for

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

// Scratch of a plan, from its first kernel to its last.  Plans of a group run one after the other
// and share it.
struct PlanScratch {
  std::int32_t* parts;       // [CTAs, E + R + 1]: what each CTA has
  std::int32_t* start;       // [R, experts of this rank]: slot of each source's first assignment
  std::int32_t* first_pair;  // [R + 1]
  std::int32_t* first_assignment;  // [R + 1]
  std::int32_t* is_refused;  // [1]: a rank's routing is bad and the host, which knows, will raise

  PlanScratch(std::int32_t* memory, const Control& control, int max_ctas)
      : parts(memory),
        start(parts + max_ctas * (control.num_experts + control.num_ranks + 1)),
        first_pair(start + control.num_experts),
        first_assignment(first_pair + control.num_ranks + 1),
        is_refused(first_assignment + control.num_ranks + 1) {}
  static std::int64_t size(const Control& control, int max_ctas) {
    const int experts = control.num_experts, ranks = control.num_ranks;
    return max_ctas * (experts + ranks + 1) + experts + 2 * (ranks + 1) + 1;
  }
};

struct PlanCount {
  const void* topk_idx;  // [T, K], int64 or int32
  bool is_int64;
  int num_tokens, top_k;
  int most_chunks;  // of the rank with the most tokens
  int alignment;
  bool is_static;
  bool has_dropped;                 // `num_dropped` is what was wanted here, before
  std::uint32_t ticket;             // what the host waits for in the mailbox; 0: it does not wait
  std::int64_t* tokens_per_expert;  // [experts of this rank]
  std::int64_t* routed_per_expert;  // [experts of this rank]
  std::int64_t* num_dropped;        // [1]
  TokenRoutes token_routes;
};

// Queues `count`.  Collective.
void plan_count(const KernelContext& me, const PlanCount& arguments, const PlanScratch& scratch,
                int num_sms, std::uintptr_t stream);

// Queues `receive`, with the scratch of `count`.  It does nothing when there is not room for all,
// and can be queued again with more; or when the plan is refused, on all ranks.
void plan_receive(const KernelContext& me, const ReceivedRoutes& routes, const PlanScratch& scratch,
                  int num_sms, std::uintptr_t stream);

}  // namespace ncclep::native
