// How dispatch and combine are cut up: CTAs for each kind of work, phases.
//
// Each CTA does one kind at a time, because what holds up one kind must not hold up the other:
// fences hold up a whole SM, and so does a link that is busy.  The first kinds come to an end, and
// their CTAs then take part in the last one, pulling or summing.
#pragma once

namespace ncclep::native {

struct DispatchSplit {
  int staging;  // CTAs that copy rows into the window
  int pulling;
};

struct CombineSplit {
  int adding;   // CTAs that add up what goes to other ranks
  int sending;  // 0: the adding ones send
  int summing;  // CTAs that add up what has come back
};

constexpr int kMinCtas = 3;

DispatchSplit split_dispatch(int num_ctas);
// In how many phases rows are staged, 1 to kPhases, where a rank has at most `most_tokens`.
int num_phases_of(int most_tokens, int row_bytes);
// For a balanced routing of `top_k` picks to `num_ranks` ranks.  Example: 32 CTAs, top-8:
// {13, 9, 10} for 4 ranks, {18, 0, 14} for 2.
CombineSplit split_combine(int num_ctas, int num_ranks, int top_k);

}  // namespace ncclep::native
