// Step 1, plan: from each token's experts to who sends what where.
//
// Two kernels.  `count` counts, exchanges the counts, gives every pick its slot and writes what
// each other rank has to know into that rank's control window; the host learns how many rows it
// will get from the mailbox.  `receive` waits until the others have done the same and moves what
// they wrote into the plan's own memory.
#pragma once

#include <cstdint>

#include "native/state.h"

namespace ncclep::native {

// What home knows of its own tokens.
struct HomeRoutes {
  std::uint32_t* token_ranks;  // [T]: ranks that have rows of the token, one bit each
  std::uint32_t* token_picks;  // [T]: picks that have a slot, one bit each
  std::uint32_t* own_picks;    // [T]: picks that stay on this rank, one bit each
  std::int32_t* own_first;     // [T]: the first of them, among all picks that stay here
};

// What arrives here, by source rank and token.
struct ReceivedRoutes {
  int num_chunks;  // of the rank with the most tokens
  std::int32_t*
      first_pair;  // [R + 1]: pairs of source r are first_pair[r] to first_pair[r + 1] - 1
  std::int32_t* chunk_pair;  // [R, num_chunks + 1]: first pair of each chunk of source r's tokens
  std::int32_t* pair_token;  // [pairs]
  std::int32_t* pair_first;  // [pairs + 1]: its picks, in ascending order of local experts
  std::int32_t* pick_slot;   // [picks]
  std::int32_t* pick_home;   // [picks]: token * K + k at home
};

struct PlanCount {
  const void* topk_idx;  // [T, K], int64 or int32
  bool is_int64;
  int num_tokens, top_k;
  int alignment;
  std::int64_t max_recv_rows;       // 0: as many as it takes
  std::int64_t* tokens_per_expert;  // [experts of this rank]
  std::int64_t* routed_per_expert;  // [experts of this rank]
  std::int64_t* num_dropped;        // [1]
  HomeRoutes home;
  std::int32_t* scratch;  // [max_chunks * columns]
};

// Queues `count`.  Collective.
void plan_count(const Rank& me, const PlanCount& arguments, int num_sms, std::uintptr_t stream);

// Queues `receive`.  `routes` has room for what the mailbox said, or for the most there can be.
void plan_receive(const Rank& me, const ReceivedRoutes& routes, int num_sms, std::uintptr_t stream);

}  // namespace ncclep::native
