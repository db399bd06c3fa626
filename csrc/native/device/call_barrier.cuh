// Compares on the device the arguments that must be equal on all ranks of a call.
//
// In exact mode the hosts agree on a plan.  In every other call (dispatch, combine, a plan in
// static mode) they do not wait for each other: a rank that enters tells all others which call it
// is in, and no rank leaves before all have entered the same one.  Every rank compares itself with
// all others, so every rank notices when any two differ.
//
// A rank's entry is one word: the call's number in the upper 16 bits, and below it what must be
// equal (host/call_signature.h).  Two words per rank are enough: a rank enters call n + 2 only
// after all have entered n + 1, and so have left n.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/state.h"

namespace ncclep::native {

__device__ inline std::uint64_t entry_of(const KernelContext& ctx, std::uint64_t number) {
  return number << 48 | ctx.call;
}

// Tells every rank that this one has entered, and so has left the previous call.  Called by all
// threads of one CTA.
template <typename R>
__device__ void enter(const KernelContext& ctx, const R& rails, Phase phase, std::uint64_t number,
                      std::uint64_t epoch) {
  if (threadIdx.x < ctx.control.local_ranks()) {
    const int rank = rank_at(ctx, threadIdx.x);
    store_release(entry_word(ctx, rank, number, ctx.rank), entry_of(ctx, number));
  }
  if constexpr (R::kEnabled) {
    const int domain = threadIdx.x, own = ctx.control.domain_of(ctx.rank);
    const RailLayout layout{ctx.control};
    if (!has_rail_peer(ctx, domain)) return;
    const std::size_t sent = layout.sent_entry() + number % 2 * 8;
    // The same word for all of them.
    *reinterpret_cast<std::uint64_t*>(ctx.control_of[ctx.rank] + sent) = entry_of(ctx, number);
    // Without room the group fails, and so does what waits here for the others' entries.
    (void)put(ctx, rails, phase, epoch, kControlWindow, domain,
              layout.entries() + (number % 2 * layout.num_domains() + own) * 8, sent, 8, kEntryPut);
  }
}

// Shows the entries of this rank's rail peers to the ranks of this domain.  Called by one warp.
template <typename R>
__device__ void pass_entries_on(const KernelContext& ctx, const R& rails, Phase phase,
                                std::uint64_t number, std::uint64_t epoch) {
  const RailLayout layout{ctx.control};
  for (int domain = threadIdx.x % kWarpSize; domain < layout.num_domains(); domain += kWarpSize) {
    if (!has_rail_peer(ctx, domain)) continue;
    if (!wait_for_signal(ctx, rails, phase, kEntryPut, domain, 1, epoch)) return;
    const std::uint64_t entry =
        __ldcg(reinterpret_cast<const std::uint64_t*>(ctx.control_of[ctx.rank] + layout.entries()) +
               number % 2 * layout.num_domains() + domain);
    fence_system();
    for (int local_rank = 0; local_rank < layout.local_ranks(); ++local_rank) {
      store_relaxed(entry_word(ctx, rank_at(ctx, local_rank), number, rail_peer_in(ctx, domain)),
                    entry);
    }
  }
}

// Leaves a call: the next one has the next number.  Called by one thread of the last CTA.
template <typename R>
__device__ void leave_call(const KernelContext& ctx, std::uint64_t number) {
  ctx.state->entries = number;
  count_signals<R>(ctx, kEntryPut, 1);
}

// Waits until `peer` has entered its call `number`, whichever call that is; returns its entry, or 0
// when the group has failed.
__device__ inline std::uint64_t wait_for_entry(const KernelContext& ctx, Phase phase, int peer,
                                               std::uint64_t number, std::uint64_t epoch) {
  const std::uint64_t* word = entry_word(ctx, ctx.rank, number, peer);
  std::uint64_t entry = 0;
  const bool arrived = wait_until(ctx, phase, peer, epoch, [&] {
    entry = load_acquire(word);
    return is_entry_of(entry, number);
  });
  return arrived ? entry : 0;
}

// Waits until all ranks have entered, and compares their entries.  Called by one warp of one CTA
// before its other waits in the kernel, which would be in vain if a rank is in a different call.
template <typename R>
__device__ void compare_entries(const KernelContext& ctx, const R& rails, Phase phase,
                                std::uint64_t number, std::uint64_t epoch) {
  if constexpr (R::kEnabled) pass_entries_on(ctx, rails, phase, number, epoch);
  const int lane = threadIdx.x % kWarpSize;
  const std::uint64_t begin = now_ns();
  const auto compare = [&](int peer, std::uint64_t entry) {
    if (entry != 0 && entry != entry_of(ctx, number)) {
      report_failure(ctx, Reason::kDiffers, phase, peer, epoch, entry & ~(~std::uint64_t{0} << 48));
    }
  };
  if constexpr (R::kEnabled) {
    constexpr int kAtOnce = 8;  // loads in flight: there may be many peers
    for (int first = lane; first < ctx.control.num_ranks; first += kAtOnce * kWarpSize) {
      std::uint64_t entries[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int peer = first + i * kWarpSize;
        if (peer >= ctx.control.num_ranks) break;
        entries[i] = load_relaxed(entry_word(ctx, ctx.rank, number, peer));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int peer = first + i * kWarpSize;
        if (peer >= ctx.control.num_ranks) break;
        if (!is_entry_of(entries[i], number)) {
          entries[i] = wait_for_entry(ctx, phase, peer, number, epoch);
        }
        compare(peer, entries[i]);
      }
    }
    fence_system();  // for entries that were here at once
  } else {
    for (int peer = lane; peer < ctx.control.num_ranks; peer += kWarpSize) {
      compare(peer, wait_for_entry(ctx, phase, peer, number, epoch));
    }
  }
  __syncwarp();
  // Operations of a group run one after the other, so nothing else adds to it.
  const std::int64_t waited = ns_since(begin);
  if (lane == 0 && waited > 0) ctx.state->waited_ns += waited;
}

}  // namespace ncclep::native
