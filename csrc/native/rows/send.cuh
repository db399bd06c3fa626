// Sending combine's sums: their destination, the signals, and the sending CTAs' work (combine.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/call_barrier.cuh"
#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/rows/combine.h"
#include "native/rows/pairs.cuh"
#include "native/rows/progress.cuh"
#include "native/rows/ring.cuh"

namespace ncclep::native {

// A sent row counts as written when its warp has issued this many more pieces.
constexpr int kSentAhead = 3;

__device__ inline RailSums rail_sums(const KernelContext& ctx) {
  const Control& layout = ctx.control;
  return {ctx.dispatch_bytes, layout.num_domains, layout.local_ranks(), layout.num_rounds};
}

// Where in rank `source`'s window, or in that of its rail peer, the sum lies that `rank` sends for
// `token`, which may be a node token's name.
template <typename R>
__device__ char* address_of_sum(const KernelContext& ctx, const Combine& job, const Round& round,
                                int source, int token, int rank) {
  if constexpr (R::kEnabled) {
    const Control& layout = ctx.control;
    return ctx.rows_of[host_of(ctx, source)] + rail_sums(ctx).of_ranks(layout.domain_of(source)) +
           (static_cast<std::size_t>(row_in_round<R>(ctx, job.rail_routes, round, source, token)) *
                layout.local_ranks() +
            layout.local_rank_of(rank)) *
               job.row_bytes;
  }
  return ctx.rows_of[source] + 2 * ctx.dispatch_bytes +
         (static_cast<std::size_t>(token) * ctx.control.num_ranks + rank) * job.row_bytes;
}

__device__ inline std::uint64_t* added_flag(const KernelContext& ctx, int source, int unit) {
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[ctx.rank] + ctx.control.added()) +
         source * ctx.control.max_units() + unit;
}

// Sends one sending warp's share of the pairs.
__device__ inline void send_sums(const KernelContext& ctx, const Combine& job,
                                 const WarpSlice& slice, const RingShape& shape, Ring& ring,
                                 Progress& progress, CompletionTracker& tracker, int warp,
                                 std::uint64_t entry, std::uint64_t epoch) {
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize;
  PairIterator<NoRails> iterator(ctx, job, {}, slice, warp);
  struct Pair {
    bool is_valid = false;
    int source = 0, pair = 0, unit = 0, token = 0, first = 0, end = 0;
    int slot = 0, index = -1;  // of this lane's assignment, if there are weights
  };
  const auto find = [&] {
    Pair found;
    found.is_valid = iterator.next();
    if (found.is_valid) {
      found.source = iterator.source;
      found.pair = iterator.pair;
      found.unit = iterator.unit();
      found.token = routes.pair_token[iterator.pair];
      if (job.has_weights) {
        found.first = routes.pair_first[iterator.pair];
        found.end = routes.pair_first[iterator.pair + 1];
      }
    }
    return found;
  };
  const auto find_slot = [&](Pair& found) {
    if (found.is_valid && lane < found.end - found.first) {
      found.slot = routes.assignment_slot[found.first + lane];
      found.index = routes.assignment_index[found.first + lane];
    }
  };
  Pair now = find(), second = find();
  find_slot(now);
  int piece = 0;
  bool has_entered = false;  // a warp sends to one rank only
  Seen seen;
  // The contents of each stage.
  char* to[kRingStages];
  int bytes[kRingStages], index[kRingStages];
  bool ends_row[kRingStages];
  float weight[kRingStages];
  const auto load = [&](int s) {
    if (!now.is_valid) return false;
    if (!has_entered) {
      has_entered =
          __all_sync(~0u, wait_for_entry(ctx, Phase::kCombine, now.source, entry, epoch) != 0);
      if (!has_entered) return now.is_valid = false;
    }
    if (!seen.wait_for_unit(progress, now.source, now.unit)) return now.is_valid = false;
    const int offset = piece * shape.piece_bytes;
    bytes[s] = min(shape.piece_bytes, job.row_bytes - offset);
    to[s] = address_of_sum<NoRails>(ctx, job, {}, now.source, now.token, ctx.rank) + offset;
    ends_row[s] = piece == shape.pieces - 1;
    index[s] = ends_row[s] ? now.index : -1;
    if (index[s] >= 0) weight[s] = job.w[now.slot];
    if (lane == 0) {
      start_load(ring.pieces + s * shape.piece_bytes,
                 job.sums + static_cast<std::size_t>(now.pair) * job.row_bytes + offset, bytes[s],
                 ring.full + s);
    }
    ++piece;
    if (!ends_row[s]) return true;
    piece = 0;
    now = second;
    second = find();
    find_slot(now);
    return true;
  };
  float* values = reinterpret_cast<float*>(ctx.control_of[iterator.source] + ctx.control.values());
  const auto store = [&](int s) {
    if (lane == 0) start_store(to[s], ring.pieces + s * shape.piece_bytes, bytes[s]);
    if (index[s] >= 0) values[index[s]] = weight[s];
    __syncwarp();
  };
  // Bit i: whether the piece sent i pieces ago was the last of its row.
  std::uint32_t row_ends = 0;
  int num_sent = 0, num_written = 0;
  const auto stored = [&](int s) {
    row_ends = row_ends << 1 | static_cast<std::uint32_t>(ends_row[s]);
    num_sent += ends_row[s];
    if (lane != 0) return;
    wait_for_older_stores<kSentAhead>();
    if (row_ends >> kSentAhead & 1) tracker.record(warp, ++num_written);
  };
  ring.run(load, store, stored);
  if (lane == 0) {
    tracker.record(warp, num_sent);
    tracker.close(warp);
  }
}

// In the window of rank `source`, or of its rail peer: the flags for the chunks of the sums that
// `rank` sends for its tokens.
template <typename R>
__device__ std::uint64_t* pushed_flags(const KernelContext& ctx, int source, int rank) {
  const Control& layout = ctx.control;
  if constexpr (R::kEnabled) {
    if (!is_local(ctx, source)) {
      return reinterpret_cast<std::uint64_t*>(ctx.control_of[host_of(ctx, source)] +
                                              RailLayout{layout}.pushed()) +
             (layout.domain_of(source) * layout.local_ranks() + layout.local_rank_of(rank)) *
                 layout.max_chunks();
    }
  }
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[source] + layout.pushed()) +
         rank * layout.max_chunks();
}

// Called for sums that are in the window of their source rank or its rail peer: tells that rank
// which chunks are complete.
template <typename R>
__device__ void publish_sent(const KernelContext& ctx, const ReceivedRoutes& routes,
                             const Batch& batch, std::uint64_t epoch) {
  const int max_chunks = ctx.control.max_chunks();
  const std::int32_t* chunk_pair = routes.chunk_pair + batch.source * (routes.num_chunks + 1);
  auto* num_pushed =
      reinterpret_cast<unsigned int*>(ctx.control_of[ctx.rank] + ctx.control.num_pushed());
  std::uint64_t* flags = pushed_flags<R>(ctx, batch.source, ctx.rank);
  count_off(
      batch, num_pushed + batch.source * max_chunks,
      [&](int pair) { return routes.pair_token[pair] / kChunk; },
      [&](int chunk) { return chunk_pair[chunk + 1] - chunk_pair[chunk]; },
      [&](int chunk) { store_relaxed(flags + chunk, epoch); });
}

// The number of units of a source.
__device__ inline int needed_units(const KernelContext& ctx, const ReceivedRoutes& routes,
                                   int source) {
  if (source == ctx.rank) return 0;
  return (routes.first_pair[source + 1] - routes.first_pair[source] + kUnit - 1) / kUnit;
}

}  // namespace ncclep::native
