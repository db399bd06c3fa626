// How kernels of a group of several NVLink domains use the network (rail_layout.h), and what stands
// for it in a group of one domain.
//
// Every operation sends the same signals to every rail peer, and waits for all that its rail peers
// send, whether it needs them or not.  So when a rank is in the next operation, everything that was
// put to it in this one has arrived.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/error.h"
#include "native/device/wait.cuh"
#include "native/rail_layout.h"
#include "native/state.h"

#ifdef NCCLEP_NCCL_HEADERS
#include "network/rail.cuh"
#endif

namespace ncclep::native {

// The rank of this domain with this local rank.
__device__ inline int rank_at(const KernelContext& ctx, int local_rank) {
  return ctx.control_of.first_rank + local_rank;
}

// The rank of this domain in whose window the data of `rank` lie: itself, or its rail peer.
__device__ inline int host_of(const KernelContext& ctx, int rank) {
  return rank_at(ctx, ctx.control.local_rank_of(rank));
}

// The local rank of a rank of this domain.
__device__ inline int local_rank(const KernelContext& ctx, int rank) {
  return rank - ctx.control_of.first_rank;
}

__device__ inline bool is_local(const KernelContext& ctx, int rank) {
  const int local = local_rank(ctx, rank);
  return 0 <= local && local < ctx.control.local_ranks();
}

__device__ inline int rail_peer_in(const KernelContext& ctx, int domain) {
  return domain * ctx.control.local_ranks() + ctx.control.local_rank_of(ctx.rank);
}

// A group of one domain.
struct NoRails {
  static constexpr bool kEnabled = false;
};

enum RailWindow : int { kControlWindow, kRowsWindow };

// How far the `number`-th signal in this operation counts, from 1.
__device__ inline std::uint64_t signals_up_to(const KernelContext& ctx, RailSignal signal,
                                              int number) {
  return *static_cast<volatile std::uint64_t*>(&ctx.state->rail_signals[signal]) + number;
}

#ifdef NCCLEP_NCCL_HEADERS

struct Rails {
  static constexpr bool kEnabled = true;
  network::Rail rail;
};

// Puts from one place of this rank's window to another of that of its rail peer, with a signal or,
// if it is kNumRailSignals, without.  Each put takes places of NCCL's queue, and before,
// `wait(is_over)` waits until there is room up to its last one: then NCCL's put does not wait,
// whatever order NCCL gets the puts in, because it has only such that have room.  How long depends
// on the network only.  False, and nothing is put, when the wait ends without room.  Called by one
// thread.
template <typename Wait>
__device__ bool put_after(Wait&& wait, const KernelContext& ctx, const Rails& rails,
                          RailWindow window, int domain, std::size_t to, std::size_t from,
                          std::size_t num_bytes, RailSignal signal) {
  QueuePlaces& places = ctx.state->queues[network::queue_of(rails.rail, domain)];
  const bool has_signal = signal != kNumRailSignals;
  const unsigned long long number = network::places_of(rails.rail, num_bytes, has_signal);
  // What was seen before is enough as long as it lasts: the network is asked once for a whole
  // queue.
  std::uint64_t room = load_relaxed(&places.room);
  const std::uint64_t end = atomicAdd(&places.given, number) + number;
  if (room < end) {
    const auto has_room = [&] {
      room = network::room_up_to(rails.rail, domain, end);
      return room >= end;
    };
    if (!wait(has_room)) return false;
    store_relaxed(&places.room, room);
  }
  const int own = ctx.control.domain_of(ctx.rank);
  network::put(rails.rail, window, domain, to, from, num_bytes,
               has_signal ? signal * ctx.control.num_domains + own : network::kNoSignal);
  return true;
}

// The same with the wait of the phase.  False when the group has failed: then the caller puts
// nothing that stands for this put, such as the signal of a later one.
[[nodiscard]] __device__ inline bool put(const KernelContext& ctx, const Rails& rails, Phase phase,
                                         std::uint64_t epoch, RailWindow window, int domain,
                                         std::size_t to, std::size_t from, std::size_t num_bytes,
                                         RailSignal signal = kNumRailSignals) {
  const auto wait = [&](auto&& is_over) {
    return wait_until(ctx, phase, rail_peer_in(ctx, domain), epoch, is_over);
  };
  return put_after(wait, ctx, rails, window, domain, to, from, num_bytes, signal);
}

// Whether the rail peer in `domain` has counted a signal up to `goal`.  Then everything that it had
// put before is visible to this thread.
__device__ inline bool has_counted(const KernelContext& ctx, const Rails& rails, RailSignal signal,
                                   int domain, std::uint64_t goal) {
  return network::read_signal(rails.rail, signal * ctx.control.num_domains + domain) >= goal;
}

// Waits for that; false when the group has failed.
__device__ inline bool wait_for_signals(const KernelContext& ctx, const Rails& rails, Phase phase,
                                        RailSignal signal, int domain, std::uint64_t goal,
                                        std::uint64_t epoch) {
  return wait_until(ctx, phase, rail_peer_in(ctx, domain), epoch,
                    [&] { return has_counted(ctx, rails, signal, domain, goal); });
}

// Waits for that signal.
__device__ inline bool wait_for_signal(const KernelContext& ctx, const Rails& rails, Phase phase,
                                       RailSignal signal, int domain, int number,
                                       std::uint64_t epoch) {
  return wait_for_signals(ctx, rails, phase, signal, domain, signals_up_to(ctx, signal, number),
                          epoch);
}

#endif

// Counts signals that this operation has waited for: the next one waits for those that follow.
// Called by one thread of the last CTA.
template <typename R>
__device__ void count_signals(const KernelContext& ctx, RailSignal signal, int number) {
  if constexpr (R::kEnabled) ctx.state->rail_signals[signal] += number;
}

// Calls `launch` with the rails of a group of several domains, or with what stands for them.
template <typename Launch>
void with_rails(const Rails* rails, Launch&& launch) {
#ifdef NCCLEP_NCCL_HEADERS
  if (rails != nullptr) return launch(*rails);
#endif
  require(rails == nullptr, "compiled without NCCL's headers");
  launch(NoRails());
}

// Whether thread or lane `domain` has a rail peer to serve.
__device__ inline bool has_rail_peer(const KernelContext& ctx, int domain) {
  return domain < ctx.control.num_domains && domain != ctx.control.domain_of(ctx.rank);
}

}  // namespace ncclep::native
