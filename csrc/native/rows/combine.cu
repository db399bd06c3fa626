// One kernel, three kinds of CTAs (cta_roles.h).
//
// *Adding* CTAs add up, in fp32 and in ascending order of local experts, the rows of each pair that
// came from another rank; the sums, rounded once, stay in this GPU's memory.  They are done unit by
// unit.
//
// *Sending* CTAs copy the sums of a unit that is done into the window of the rank they are for, and
// tell that rank when a chunk of its tokens is complete.  Copies need few SMs, and a busy link
// stalls only these CTAs.
//
// Where the link is not the bottleneck (cta_roles.h), there are no sending CTAs, and the adding
// ones store into the windows of other ranks themselves.
//
// *Summing* CTAs wait for the chunks of this rank's own tokens and add up the ranks' parts in
// ascending order, this rank's own part straight from its rows, unrounded. They claim tokens from a
// work counter, and warps of the other kinds join them when their own work is done.
//
// The window for sums has a row for each (token, rank).  No rank sends into another's window before
// that rank has entered this combine, and so has left the previous one.
//
// With several NVLink domains the adding CTAs send what is for a rank of another domain to its rail
// peer in this one.  rows/domain_sums.cuh has the rest.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/launch.h"
#include "native/device/call_barrier.cuh"
#include "native/device/wait.cuh"
#include "native/device/work_counter.cuh"
#include "native/rank_set.cuh"
#include "native/rows/combine.h"
#include "native/rows/cta_roles.h"
#include "native/rows/domain_sums.cuh"
#include "native/rows/pairs.cuh"
#include "native/rows/progress.cuh"
#include "native/rows/reduce_rows.cuh"
#include "native/rows/ring.cuh"
#include "native/rows/send.cuh"

namespace ncclep::native {

namespace {

using RowRing = PieceRing<5>;

// Adds up one adding warp's share of the pairs; `num_done` counts them.
template <typename T, typename R>
__device__ void reduce_pairs(const KernelContext& ctx, const Combine& job, const Round& round,
                             const WarpSlice& slice, bool sends, RowRing& ring,
                             CompletionTracker& tracker, int warp, int& num_done,
                             std::uint64_t entry, std::uint64_t epoch) {
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize;
  PairIterator<R> iterator(ctx, job, round, slice, warp);
  const bool sends_weights = sends && job.has_weights;
  // Routes are prefetched: the range of assignments of the pair after the next one, and the slots
  // of the next one.
  struct Pair {
    bool is_valid = false;
    int pair = 0, token = 0, first = 0, end = 0;
    int slot = 0, index = 0;  // of this lane's assignment
  };
  const auto find = [&] {
    Pair found;
    found.is_valid = iterator.next();
    if (found.is_valid) {
      found.pair = iterator.pair;
      found.first = routes.pair_first[iterator.pair];
      found.end = routes.pair_first[iterator.pair + 1];
      if (sends) found.token = routes.pair_token[iterator.pair];
    }
    return found;
  };
  const auto find_slot = [&](Pair& found) {
    if (!found.is_valid || lane >= found.end - found.first) return;
    found.slot = routes.assignment_slot[found.first + lane];
    if (sends_weights) {
      found.index = routes.assignment_index[found.first + lane];
    }
  };
  Pair now, following = find(), second = find();
  find_slot(following);
  const int source = iterator.source;  // a warp's pairs all come from one rank
  float* values = values_for<R>(ctx, source);
  float weight = 0;
  bool has_entered = !sends;
  const auto next = [&](Sum* sum) {
    if (sends_weights && now.is_valid && lane < now.end - now.first) values[now.index] = weight;
    now = following;
    if (!now.is_valid) return false;
    following = second;
    second = find();
    find_slot(following);
    if (!has_entered) {
      // A source in another domain, not only its rail peer here: what that puts to it comes from
      // where values are sent now.
      has_entered =
          __all_sync(~0u, wait_for_entry(ctx, Phase::kCombine, source, entry, epoch) != 0);
      if (!has_entered) return now.is_valid = false;
    }
    sum->row = job.y + static_cast<std::size_t>(now.slot) * job.row_bytes;
    sum->num_rows = now.end - now.first;
    sum->part_begin = sum->part_end = 0;
    sum->out = sends ? address_of_sum<R>(ctx, job, round, source, now.token, ctx.rank)
                     : job.sums + static_cast<std::size_t>(now.pair) * job.row_bytes;
    if (sends_weights && lane < sum->num_rows) weight = job.w[now.slot];
    return true;
  };
  if constexpr (R::kEnabled) {
    // Also for a round without pairs: after this one, what was sent in none before it is in use.
    if (round.number > 0 && iterator.has_source() &&
        !__all_sync(~0u, wait_for_round(ctx, Phase::kCombine, host_of(ctx, source),
                                        round.number - 1, epoch))) {
      return;
    }
  }
  const auto done = [&] {
    __syncwarp();
    if (lane == 0) tracker.record(warp, ++num_done);
  };
  reduce_rows<T, false>(ring, job.row_bytes, next, done);
}

// Called for computed sums: tells the sending CTAs which units are complete.
__device__ void publish_added(const KernelContext& ctx, const ReceivedRoutes& routes,
                              const Batch& batch, std::uint64_t epoch) {
  const int first = routes.first_pair[batch.source], end = routes.first_pair[batch.source + 1];
  auto* num_added =
      reinterpret_cast<unsigned int*>(ctx.control_of[ctx.rank] + ctx.control.num_added());
  count_off(
      batch, num_added + batch.source * ctx.control.max_units(),
      [&](int pair) { return (pair - first) / kUnit; },
      [&](int unit) { return min(kUnit, end - first - unit * kUnit); },
      [&](int unit) { store_relaxed(added_flag(ctx, batch.source, unit), epoch); });
}

// Sums up this rank's tokens until all of them are taken.  Called by one warp.
//
// This rank's own part needs a separate sum when two or more parts precede it; with fewer, its own
// rows are added up first, since a + b = b + a.  Without the separate sum the kernel needs half as
// many registers, so ranks 0 and 1 have a kernel without it (kHasParts = false).
template <typename T, bool kHasParts>
__device__ void combine_tokens(const KernelContext& ctx, const Combine& job, RowRing& ring,
                               const char** parts, std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const ReceivedRoutes& routes = job.routes;
  const int num_ranks = layout.num_ranks, lane = threadIdx.x % kWarpSize;
  const auto* flags =
      reinterpret_cast<const std::uint64_t*>(ctx.control_of[ctx.rank] + layout.pushed());
  const auto* values = reinterpret_cast<const float*>(ctx.control_of[ctx.rank] + layout.values());
  const int first_own = routes.pair_first[routes.first_pair[ctx.rank]];
  // Prefetched as in `reduce_pairs`: the masks of the token after the next one, and the own slots
  // of the next one.
  struct Token {
    int token = 0;
    RankSet ranks{};
    std::uint32_t assignments = 0, own_assignments = 0;
    int first = 0, slot = 0;
  };
  WorkCounter counter(ctx);
  const auto find = [&] {
    Token found;
    found.token = counter.take();
    if (found.token < job.num_tokens) {
      found.ranks = rank_sets(job.token_routes.token_ranks)[found.token];
      found.assignments = job.token_routes.token_assignments[found.token];
      found.own_assignments = job.token_routes.own_assignments[found.token];
      found.first = job.token_routes.own_first[found.token];
    }
    return found;
  };
  const auto find_slot = [&](Token& found) {
    if (lane < __popc(found.own_assignments)) {
      found.slot = routes.assignment_slot[first_own + found.first + lane];
    }
  };
  Token following = find(), second = find();
  find_slot(following);
  const auto next = [&](Sum* sum) {
    const Token now = following;
    if (now.token >= job.num_tokens) return false;
    following = second;
    second = find();
    find_slot(following);
    const RankSet others = now.ranks & ~one_rank(ctx.rank);
    bool is_part[kRankGroups];  // that of this lane's rank of each group
    bool arrived = true;
#pragma unroll
    for (int group = 0; group < kRankGroups; ++group) {
      const int rank = group * kWarpSize + lane;
      is_part[group] = rank < num_ranks && (word_of(others, group) >> lane & 1);
      if (is_part[group] && arrived) {
        arrived = wait_for(ctx, Phase::kCombine, rank,
                           flags + rank * layout.max_chunks() + now.token / kChunk, epoch);
      }
    }
    if (!__all_sync(~0u, arrived)) return false;
    // Order: parts of lower ranks, own rows, parts of higher ranks; or own rows first.
    const int own_rows = __popc(now.own_assignments);
    RankSet lower[kRankGroups];
#pragma unroll
    for (int group = 0; group < kRankGroups; ++group) {
      lower[group] = ranks_before(group * kWarpSize + lane);
    }
    const RankSet lower_ranks = ranks_before(ctx.rank);
    const int parts_before = number_of(others & lower_ranks);
    const bool is_own_first = !kHasParts || parts_before < 2;
    const int own_first = is_own_first ? 0 : parts_before;
#pragma unroll
    for (int group = 0; group < kRankGroups; ++group) {
      if (!is_part[group]) continue;
      const int rank = group * kWarpSize + lane;
      parts[number_of(others & lower[group]) + (is_own_first || rank > ctx.rank ? own_rows : 0)] =
          address_of_sum<NoRails>(ctx, job, {}, ctx.rank, now.token, rank);
    }
    if (lane < own_rows) {
      parts[own_first + lane] = job.y + static_cast<std::size_t>(now.slot) * job.row_bytes;
    }
    __syncwarp();
    sum->row = parts[lane];
    __syncwarp();
    sum->num_rows = number_of(others) + own_rows;
    sum->part_begin = own_first;
    sum->part_end = own_first + (is_own_first || own_rows == 1 ? 0 : own_rows);
    sum->out = job.out + static_cast<std::size_t>(now.token) * job.row_bytes;
    if (job.has_weights) {
      const std::size_t first = static_cast<std::size_t>(now.token) * job.top_k;
      if (lane < job.top_k && !(now.own_assignments >> lane & 1)) {
        job.topk_w[first + lane] =
            now.assignments >> lane & 1 ? __ldcg(values + first + lane) : 0.0f;
      }
      if (lane < own_rows) {
        job.topk_w[routes.assignment_index[first_own + now.first + lane]] = job.w[now.slot];
      }
    }
    return true;
  };
  reduce_rows<T, kHasParts>(ring, job.row_bytes, next, [] {});
}

// All threads call this last.
template <typename R>
__device__ void finish(const KernelContext& ctx, const Combine& job, std::uint64_t entry,
                       std::uint64_t epoch) {
  if (!leave(ctx)) return;
  if (has_failed(ctx)) {
    fill_nan(job.out, static_cast<std::size_t>(job.num_tokens) * job.row_bytes);
    if (job.has_weights) {
      fill_nan(job.topk_w, static_cast<std::size_t>(job.num_tokens) * job.top_k * sizeof(float));
    }
  }
  if constexpr (R::kEnabled) clear_rounds(ctx);
  if (threadIdx.x == 0) {
    leave_call<R>(ctx, entry);
    if constexpr (R::kEnabled) {
      const int num_rounds = num_rounds_of(job);
      count_signals<R>(ctx, kSumsPut, num_rounds * num_phases_in(job));
      count_signals<R>(ctx, kAddedUpPut, max(0, num_rounds - 2));
    }
    ctx.state->epoch = epoch;
  }
}

template <typename T, bool kHasParts, typename R>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1)
    combine_kernel(const __grid_constant__ KernelContext ctx, const __grid_constant__ Combine job,
                   RingShape shape, CombineSplit split, const __grid_constant__ R rails) {
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(8) std::uint64_t full[kMaxRingWarps][kRingStages];
  __shared__ const char* parts[kWarps][kWarpSize];
  __shared__ Progress progress;
  __shared__ CompletionTracker tracker;
  const std::uint64_t epoch = current_epoch(ctx), entry = current_entry(ctx);
  const int warp = threadIdx.x / kWarpSize, cta = blockIdx.x;
  progress.clear();
  tracker.clear();
  if (had_failed(ctx)) {
    finish<R>(ctx, job, entry, epoch);
    return;
  }
  if (cta == 0) {
    enter(ctx, rails, Phase::kCombine, entry, epoch);
    if (warp == 0) compare_entries(ctx, rails, Phase::kCombine, entry, epoch);
  }
  auto* row_rings = reinterpret_cast<RowRing*>(memory);
  if (cta < split.adding) {
    const WarpSlice slice{split.adding, kAddingWarps, cta};
    const bool sends = split.sending == 0;
    if (warp < kAddingWarps) {
      int num_done = 0;
      const auto add_round = [&](const Round& round) {
        reduce_pairs<T, R>(ctx, job, round, slice, sends, row_rings[warp], tracker, warp, num_done,
                           entry, epoch);
      };
      if constexpr (R::kEnabled) {
        for (int number = 0; number < num_rounds_of(job); ++number) {
          add_round(round_of(job, number));
          __syncwarp();
        }
      } else {
        add_round({});
      }
      if (threadIdx.x % kWarpSize == 0) tracker.close(warp);
    } else {
      track_completion<R>(ctx, job, slice, tracker, [&](const Batch& batch) {
        if (sends) {
          publish_sent<R>(ctx, job.routes, batch, epoch);
        } else {
          publish_added(ctx, job.routes, batch, epoch);
        }
      });
    }
  } else if (!R::kEnabled && cta < split.adding + split.sending) {
    // Warps with rings first, then the watching and the book-keeping warp.
    const WarpSlice slice{split.sending, shape.warps, cta - split.adding};
    if (warp < shape.warps) {
      Ring ring{memory + warp * kRingStages * shape.piece_bytes, full[warp]};
      ring.init();
      send_sums(ctx, job, slice, shape, ring, progress, tracker, warp, entry, epoch);
    } else if (warp == kWarps - 2) {
      const auto flag = [&](int source, int unit) { return added_flag(ctx, source, unit); };
      const auto needed = [&](int source) { return needed_units(ctx, job.routes, source); };
      watch<NoRails>(ctx, Phase::kCombine, epoch, needed, flag, progress);
    } else if (warp == kWarps - 1) {
      track_completion<NoRails>(ctx, job, slice, tracker, [&](const Batch& batch) {
        publish_sent<NoRails>(ctx, job.routes, batch, epoch);
      });
    }
    __syncthreads();  // the rings for sums reuse the memory of its rings
  }
  if constexpr (R::kEnabled) {
    if (cta == static_cast<int>(gridDim.x) - 1) {  // it adds nothing up for others
      if (warp == 0) put_sums(ctx, rails, job, epoch);
      if (warp == 1) pass_sums_on(ctx, rails, job, epoch);
      __syncwarp();
    }
    sum_over_domains<T>(ctx, rails, job, row_rings[warp], parts[warp], entry, epoch);
  } else {
    combine_tokens<T, kHasParts>(ctx, job, row_rings[warp], parts[warp], epoch);
  }
  finish<R>(ctx, job, entry, epoch);
}

template <typename T, typename R>
auto kernel_for(bool has_parts) {
  if constexpr (R::kEnabled)
    return combine_kernel<T, true, R>;
  else
    return has_parts ? combine_kernel<T, true, R> : combine_kernel<T, false, R>;
}

// Also with rings, whose bytes are `rings`.
std::size_t shared_bytes(std::size_t rings) { return std::max(sizeof(RowRing) * kWarps, rings); }

}  // namespace

template <>
std::size_t combine_shared_bytes<kRankGroups>() {
  const auto kernel = kernel_for<__nv_bfloat16, NoRails>(true);
  return shared_bytes_of("combine", kernel, shared_bytes(kRingBytes));
}

template <>
void combine(const KernelContext& ctx, const Combine& arguments, int num_sms, std::uintptr_t stream,
             const Rails* rails) {
  const bool has_parts = ctx.rank > 1;
  const RingShape shape = sending_ring_shape(arguments.row_bytes);
  const CombineSplit split = split_combine(num_sms, ctx.control.num_ranks, arguments.top_k,
                                           arguments.row_bytes, ctx.control.num_domains);
  Combine job = arguments;
  job.round_tokens = ctx.control.round_tokens();
  with_rails(rails, [&](const auto& way) {
    using R = std::decay_t<decltype(way)>;
    const auto kernel = job.dtype == ncclepBfloat16  ? kernel_for<__nv_bfloat16, R>(has_parts)
                        : job.dtype == ncclepFloat16 ? kernel_for<__half, R>(has_parts)
                                                     : kernel_for<float, R>(has_parts);
    launch_cooperatively("combine", kernel, num_sms, kWarps * kWarpSize,
                         shared_bytes(shape.shared_bytes()), stream, ctx, job, shape, split, way);
  });
}

}  // namespace ncclep::native
