// What the engine needs of a GPU, and how much of its memory: known before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "native/state.h"

namespace ncclep::native {

// Says what the current device lacks for the engine's kernels; empty if nothing.  Those of
// low-latency mode have static shared memory only, of which every GPU has enough.
std::string device_problem();

// The windows of a rank.
struct WindowSizes {
  Control control;  // what they are for
  std::size_t row_bytes;
  std::size_t control_bytes, rows_bytes;  // of the two windows
};
// For `control`'s group, and for batches of at most this many tokens of a rank.
WindowSizes window_sizes(Control control, int max_tokens, int top_k, std::size_t row_bytes);

// Of a plan's routes, in int32: the part for other domains, at the start, and all of them.
std::int64_t rail_routes_size(const Control& control, int num_chunks);
std::int64_t routes_size(const Control& control, std::int64_t max_pairs,
                         std::int64_t max_assignments, int num_chunks);

}  // namespace ncclep::native
