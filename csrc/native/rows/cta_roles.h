// How the work of dispatch and combine is divided: CTAs for each kind of work, warps, pieces of
// rows, phases.
//
// Each CTA does one kind of work at a time, so that a stall of one kind does not stall the others:
// fences stall a whole SM, and so does a busy link.  CTAs that finish the first kinds then join the
// last one, pulling or summing.
#pragma once

#include "native/state.h"

namespace ncclep::native {

constexpr int kWarps = 16;                // of a CTA of dispatch and combine
constexpr int kAddingWarps = kWarps - 1;  // the last warp of an adding CTA does the book-keeping
constexpr int kMaxRingWarps = kWarps - 1;
constexpr int kRingStages = 4;
constexpr int kRingBytes = 200 * 1024;    // of a CTA
constexpr int kMaxRingPiece = 16 * 1024;  // longer rows travel in pieces

// How a CTA moves rows in bulk (ring.cuh).
struct RingShape {
  int warps;        // warps of a CTA that have a ring
  int piece_bytes;  // of a row, at most; a multiple of 16
  int pieces;       // of a row

  int shared_bytes() const { return warps * kRingStages * piece_bytes; }
};

RingShape ring_shape(int row_bytes);
// The same, leaving two warps of a CTA for other work.
RingShape sending_ring_shape(int row_bytes);

struct DispatchSplit {
  int staging;  // CTAs that copy rows into the window
  int pulling;
};

struct CombineSplit {
  int adding;   // CTAs that add up what goes to other ranks
  int sending;  // 0: the adding ones send
  int summing;  // CTAs that add up what has come back
};

// The fewest CTAs with which dispatch and combine can run: with fewer, some rank would have no warp
// that adds up for it.
int min_ctas(int num_ranks);

DispatchSplit split_dispatch(int num_ctas);
// The number of phases in which rows are staged, 1 to kPhases, if a rank has at most `most_tokens`.
int num_phases_of(int most_tokens, int row_bytes);
// For a balanced routing of `top_k` assignments to `num_ranks` ranks.  Every other rank has a warp
// that adds up for it and, if there are sending CTAs, one that sends to it.  Example: 32 CTAs,
// top-8, rows of 14336 bytes: {18, 0, 14} for 2 ranks, {13, 0, 19} for 4, {10, 9, 13} for 8.
// With several NVLink domains the adding CTAs send.
CombineSplit split_combine(int num_ctas, int num_ranks, int top_k, int row_bytes,
                           int num_domains = 1);

}  // namespace ncclep::native
