// Step 3, combine: the experts' ranks add up and send one row for each pair, and the source rank
// adds up the ranks' rows.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "native/plan/plan.h"
#include "native/state.h"

namespace ncclep::native {

struct Combine {
  const char* y;   // [num_rows, hidden]
  char* sums;      // [pairs, hidden]: scratch for the sums that are sent to other ranks
  const float* w;  // [num_rows], or null
  char* out;       // [T, hidden]
  float* topk_w;   // [T, K], or null
  // Needed because a tensor without elements has a null pointer too.
  bool has_weights;
  DType dtype;  // bf16, fp16 or fp32
  int num_tokens, top_k, row_bytes;
  TokenRoutes token_routes;
  ReceivedRoutes routes;
  // With several domains: the tokens of any rank, and the phases in which the sums of a
  // round are put, 1 to kPhases; the same on all ranks.
  int most_tokens = 0, num_phases = 0;
  RailRoutes rail_routes{};
  int round_tokens = 0;  // at most; set by `combine`
};

// The most shared memory of a CTA of combine, in bytes; see common/launch.h.
template <int kGroups>
[[gnu::visibility("hidden")]] std::size_t combine_shared_bytes();

// Queues the combine.  Collective.  `rails` are null unless there are several domains.
template <int kGroups>
void combine(const KernelContextOf<kGroups>& ctx, const Combine& arguments, int num_sms,
             std::uintptr_t stream, const Rails* rails = nullptr);

}  // namespace ncclep::native
