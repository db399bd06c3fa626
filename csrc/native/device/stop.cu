#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/device/rails.cuh"
#include "native/device/stop.h"
#include "native/device/wait.cuh"

namespace ncclep::native {

namespace {

// One for each domain, and for each rank of this one.
constexpr int kThreads = kRankGroups == 1 ? 64 : 96;
static_assert(kThreads >= kMaxDomains && kThreads >= kRankGroups * kWarpSize);

// Puts a word whether or not the group has failed, within the deadline from `begin` on.
template <typename R>
__device__ void put_last(const KernelContext& ctx, const R& rails, std::uint64_t begin, int domain,
                         std::size_t to, std::size_t from, std::size_t num_bytes,
                         RailSignal signal) {
  const auto wait = [&](auto&& is_over) {
    while (!is_over()) {
      if (ns_since(begin) > static_cast<std::int64_t>(ctx.deadline_ns)) return false;
    }
    return true;
  };
  put_after(wait, ctx, rails, kControlWindow, domain, to, from, num_bytes, signal);
}

template <typename R>
__global__ void refuse_kernel(KernelContext ctx, Phase phase, const __grid_constant__ R rails) {
  const int domain = threadIdx.x, local_rank = threadIdx.x;
  // Do not overwrite what another rank reports of an earlier operation.
  if (had_failed(ctx)) return;
  const std::uint64_t epoch = current_epoch(ctx);
  const std::uint64_t word = epoch << kStopBits | (ctx.rank + 1);
  if (local_rank == ctx.control.local_rank_of(ctx.rank)) {
    report_failure(ctx, Reason::kRefused, phase, ctx.rank, epoch);
  } else if (local_rank < ctx.control.local_ranks()) {
    store_relaxed(stop_word(ctx, rank_at(ctx, local_rank)), word);
  }
  if constexpr (R::kEnabled) {
    // The rail peers tell the ranks of their domains (wait.cuh).
    const std::size_t sent = RailLayout{ctx.control}.sent_stop();
    if (!has_rail_peer(ctx, domain)) return;
    *reinterpret_cast<std::uint64_t*>(ctx.control_of[ctx.rank] + sent) = word;
    put_last(ctx, rails, now_ns(), domain, ctx.control.stop(), sent, 8, kStopPut);
  }
}

template <typename R>
void launch_refusal(const KernelContext& ctx, Phase phase, std::uintptr_t stream, const R& rails) {
  const auto kernel = refuse_kernel<R>;
  kernel<<<1, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(ctx, phase, rails);
  cuda_check(cudaGetLastError(), "launching a refusal");
}

#ifdef NCCLEP_NCCL_HEADERS

// A rail peer's first signal says that all that it has put is here; its second, that it has seen
// this rank's first, and so has all that this rank has put.
constexpr int kLastRounds = 2;

__global__ void drain_kernel(KernelContext ctx, const __grid_constant__ Rails rails) {
  const int domain = threadIdx.x, signal = kLastPut * ctx.control.num_domains + domain;
  const std::uint64_t before = ctx.state->rail_signals[kLastPut], begin = now_ns();
  if (has_rail_peer(ctx, domain)) {
    for (int round = 1; round <= kLastRounds; ++round) {
      put_last(ctx, rails, begin, domain, 0, 0, 0, kLastPut);
      while (network::read_signal(rails.rail, signal) < before + round) {
        if (ns_since(begin) > static_cast<std::int64_t>(ctx.deadline_ns)) break;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) count_signals<Rails>(ctx, kLastPut, kLastRounds);
}

// NCCL's queues may be those of an earlier group of the same communicator.
__global__ void begin_puts_kernel(KernelContext ctx, const __grid_constant__ Rails rails) {
  const int domain = threadIdx.x;
  if (!has_rail_peer(ctx, domain)) return;
  const std::uint64_t taken = network::places_taken(rails.rail, domain);
  ctx.state->queues[network::queue_of(rails.rail, domain)] = {taken, taken};
}

#endif

}  // namespace

template <>
void refuse(const KernelContext& ctx, Phase phase, std::uintptr_t stream, const Rails* rails) {
  with_rails(rails, [&](const auto& way) { launch_refusal(ctx, phase, stream, way); });
}

template <>
void begin_puts([[maybe_unused]] const KernelContext& ctx, [[maybe_unused]] std::uintptr_t stream,
                [[maybe_unused]] const Rails& rails) {
#ifdef NCCLEP_NCCL_HEADERS
  begin_puts_kernel<<<1, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(ctx, rails);
  cuda_check(cudaGetLastError(), "launching a look at the network's queues");
#endif
}

template <>
void drain_network([[maybe_unused]] const KernelContext& ctx,
                   [[maybe_unused]] std::uintptr_t stream, [[maybe_unused]] const Rails& rails) {
#ifdef NCCLEP_NCCL_HEADERS
  drain_kernel<<<1, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(ctx, rails);
  cuda_check(cudaGetLastError(), "launching the last words to the rail peers");
#endif
}

}  // namespace ncclep::native
