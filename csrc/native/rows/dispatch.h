// Step 2, dispatch: every destination pulls the rows that it needs and puts them into their slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/plan/plan.h"
#include "native/state.h"

namespace ncclep::native {

struct Dispatch {
  const char* x;   // [T, row_bytes]
  const float* w;  // [T, K], or null
  char* rows;      // [num_rows, row_bytes]
  float* row_w;    // [num_rows], or null
  // Needed because a tensor without elements has a null pointer too.
  bool has_weights;
  int num_tokens, most_tokens, top_k, row_bytes;  // most_tokens: of any rank
  int num_phases;  // in which the rows of a round are staged, 1 to kPhases; the same on all ranks
  std::int64_t num_rows;
  bool leaves_unused;                     // rows after the last block stay as they are
  const std::int64_t* tokens_per_expert;  // [experts of this rank]
  const std::int64_t* routed_per_expert;  // [experts of this rank]
  const std::uint32_t* token_ranks;       // [T, G]: see TokenRoutes
  ReceivedRoutes routes;
  RailRoutes rail_routes{};  // with several domains
  int round_tokens = 0;      // at most; set by `dispatch`
};

// The most shared memory of a CTA of dispatch, in bytes; see common/launch.h.
template <int kGroups>
[[gnu::visibility("hidden")]] std::size_t dispatch_shared_bytes();

// Queues the dispatch.  Collective.  `rails` are null unless there are several domains.
template <int kGroups>
void dispatch(const KernelContextOf<kGroups>& ctx, const Dispatch& arguments, int num_sms,
              std::uintptr_t stream, const Rails* rails = nullptr);

}  // namespace ncclep::native
