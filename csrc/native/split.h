// How the CTAs of dispatch and combine share their two kinds of work.
//
// Each CTA does one kind only: what holds up one kind (fences while rows are staged, a congested
// link while sums are pushed) must not hold up the other.
#pragma once

namespace ncclep::native {

struct Split {
  int senders;    // CTAs that stage rows, or push sums
  int receivers;  // CTAs that pull rows, or add the ranks' sums up
};

// By the bytes that each kind moves in a balanced routing of `top_k` picks to `num_ranks` ranks.
// Example: 32 CTAs, 4 ranks, top-8: dispatch {6, 26}, combine {18, 14}.
Split split_dispatch(int num_ctas, int num_ranks, int top_k);
Split split_combine(int num_ctas, int num_ranks, int top_k);

}  // namespace ncclep::native
