// Sequences of operations, drawn at random.
#pragma once

#include <string>
#include <vector>

#include "runner.h"

using emu::between;
using emu::one_of;

// Shapes of a kind of sequence:
//
//   rows        rows of one piece and of several
//   dispatches  one dispatch after the other, of smaller shapes
//   combines    one combine after the other, of some chunks
//   chunks      more chunks of tokens than a CTA holds, and many CTAs
//   experts     more experts of a rank than a warp has lanes, and many assignments
//   plans       one plan after the other, with assignments that are no experts
//   failures    what run_failure takes, with a rank that stops
//   late        the same, with CTAs that come late
//   calls       the same, with a rank that is in another call
//
// And without sequences: "network", what crosses between nodes (between_nodes.h).
Sizes draw_sizes(const std::string& kind, int ranks, const Starts& starts);

// What a sequence of that kind is made of: plans and dispatches of 10 steps, and assignments of
// 1000 that are no good.
struct Shares {
  int plans = 2, dispatches = 4, bad_assignments = 0;
};
Shares shares_of(const std::string& kind);

// `number` steps and one; the first is a plan.
std::vector<Step> draw_steps(const Sizes& sizes, const Shares& shares, int number,
                             std::vector<Routing>& routings);

// A sequence in which a rank does not come (failures.cpp).
void run_failure(const Sizes& sizes, const std::string& kind);
