// Static mode: selects the assignments of this rank that fit into the rows of their destinations.
//
// The rule is the contract's (docs/contract.md, "Exact and static mode"; in Python
// megatron_ncclep/engines/overflow.py).
#pragma once

#include <cstdint>

#include "native/plan/plan.h"
#include "native/state.h"

namespace ncclep::native {

struct Drop {
  const void* topk_idx;  // [T, K], int64 or int32
  bool is_int64;
  int num_tokens, top_k;
  int alignment;
  std::int64_t max_recv_rows;
  std::int32_t* kept;  // [T, K]: topk_idx, -1 where an assignment does not fit or names no expert
  std::int64_t* num_requested;  // [1]: assignments of all ranks for this rank's experts
  // Null, or [R], the rows that ranks lacked so far: for the plan in which a rank lacked most, the
  // rows that it lacked << 32 | max_recv_rows.  Every rank records the same values for all ranks.
  std::int64_t* lacked;
};

// Queues `drop`.  Collective; `count` of the same plan must follow, on `kept`.  `rails` are null
// unless there are several domains.
template <int kGroups>
void drop_what_does_not_fit(const KernelContextOf<kGroups>& ctx, const Drop& arguments,
                            const PlanScratch& scratch, int num_sms, std::uintptr_t stream,
                            const Rails* rails = nullptr);

}  // namespace ncclep::native
