// What kernels do on a rail, through NCCL's device functions (GIN): put into the memory of the rail
// peers, and look for what those have put.  Included only where NCCL's headers are.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <cstddef>
#include <cstdint>

#include "common/order.cuh"

static_assert(NCCL_VERSION_CODE >= 23007, "NCCL's headers must be those of 2.30.7 or newer");

namespace ncclep::network {

// Windows that a kernel puts into, at most.
constexpr int kNumWindows = 2;

// Passed to kernels.
struct Rail {
  ncclDevComm device;
  ncclWindow_t windows[kNumWindows];
};

// NCCL keeps puts in queues: one for each rail peer, or, with GPI, one for all.  Those to domains
// with the same number share one.
__device__ inline int queue_of(const Rail& rail, int domain) {
  return ncclGin(rail.device, 0)._ginBackend == NCCL_NET_DEVICE_GIN_GPI ? 0 : domain;
}

// Places that a put takes in its queue.  The proxy and GDAKI cut it into pieces of 1 GiB, of which
// there is one at least; a signal takes a place of its own with GDAKI, and the only one if there is
// nothing else to put.
__host__ __device__ constexpr std::uint64_t places_of(int backend, std::size_t num_bytes,
                                                      bool has_signal) {
  if (backend == NCCL_NET_DEVICE_GIN_GPI || (num_bytes == 0 && has_signal)) return 1;
  const std::uint64_t pieces = (num_bytes + (std::size_t{1} << 30) - 1) >> 30;
  return (pieces > 0 ? pieces : 1) + (backend == NCCL_NET_DEVICE_GIN_GDAKI && has_signal ? 1 : 0);
}

// A plan puts nothing to ranks that get nothing, and NCCL takes a place for that.
static_assert(places_of(NCCL_NET_DEVICE_GIN_GDAKI, 0, false) == 1);
static_assert(places_of(NCCL_NET_DEVICE_GIN_GDAKI, 0, true) == 1);
static_assert(places_of(NCCL_NET_DEVICE_GIN_GDAKI, 8, true) == 2);
static_assert(places_of(NCCL_NET_DEVICE_GIN_PROXY, 8, true) == 1);
static_assert(places_of(NCCL_NET_DEVICE_GIN_PROXY, (std::size_t{1} << 30) + 1, false) == 2);

__device__ inline std::uint64_t places_of(const Rail& rail, std::size_t num_bytes,
                                          bool has_signal) {
  return places_of(ncclGin(rail.device, 0)._ginBackend, num_bytes, has_signal);
}

__device__ inline int peer_in_queues(const Rail& rail, int domain) {
  return rail.device.ginConnectionsRailed
             ? domain
             : ncclTeamRankToWorld(rail.device, ncclTeamRail(rail.device), domain);
}

// A rank's queues, as each backend keeps them.
template <typename Context>
__device__ const ncclGinProxyGpuCtx_t& proxy_queues(const Context& context) {
  return static_cast<const ncclGinProxyGpuCtx_t*>(context.handle)[context.contextId];
}
#if NCCL_GIN_GDAKI_ENABLE
template <typename Context>
__device__ auto* gdaki_queues(const Context& context) {
  return static_cast<ncclGinGdakiGPUContext*>(context.handle)[context.contextId].gdqp;
}
#endif
#if NCCL_GIN_GPI_ENABLE
template <typename Context>
__device__ const Queue_t& gpi_queue(const Context& context) {
  return nccl::gin::gpi::gpi_gpu_channel_get_ptr(context)->queue_;
}
#endif

// Places of the queue to the rail peer in `domain` that puts have taken so far, from its beginning
// on; with the proxy only the lower 32 bits.
__device__ inline std::uint64_t places_taken(const Rail& rail, int domain) {
  const auto context = ncclGin(rail.device, 0)._makeCtx();
  const int peer = peer_in_queues(rail, domain);
  switch (context.backend) {
    case NCCL_NET_DEVICE_GIN_PROXY:
      return *static_cast<const volatile std::uint32_t*>(proxy_queues(context).pis + peer);
#if NCCL_GIN_GDAKI_ENABLE
    case NCCL_NET_DEVICE_GIN_GDAKI:
      return *static_cast<const volatile std::uint64_t*>(
          &gdaki_queues(context)[peer].sq_rsvd_index);
#endif
#if NCCL_GIN_GPI_ENABLE
    case NCCL_NET_DEVICE_GIN_GPI:
      return *static_cast<const volatile std::uint64_t*>(&gpi_queue(context).pi_);
#endif
    default:
      return 0;
  }
}

// Up to which place, counted like `places_taken`, the queue has room now; less than `end` if there
// is none for the places before `end`.  It asks the network as NCCL's own puts do, and may take as
// long as a read of the host's memory.
__device__ inline std::uint64_t room_up_to(const Rail& rail, int domain, std::uint64_t end) {
  const auto context = ncclGin(rail.device, 0)._makeCtx();
  const int peer = peer_in_queues(rail, domain);
  switch (context.backend) {
    case NCCL_NET_DEVICE_GIN_PROXY: {
      const ncclGinProxyGpuCtx_t& queue = proxy_queues(context);
      const std::uint32_t done = *static_cast<const volatile std::uint32_t*>(queue.cis + peer);
      const auto beyond =
          static_cast<std::int32_t>(done + queue.queueSize - static_cast<std::uint32_t>(end));
      return end + static_cast<std::int64_t>(beyond);
    }
#if NCCL_GIN_GDAKI_ENABLE
    case NCCL_NET_DEVICE_GIN_GDAKI: {
      auto* const queue = gdaki_queues(context) + peer;
      if (end <= queue->sq_wqe_num) return queue->sq_wqe_num;
      const std::uint64_t before = end - 1 - queue->sq_wqe_num;  // had the last place before
      return doca_gpu_dev_verbs_poll_one_cq_at(&queue->cq_sq, before) == 0 ? end : end - 1;
    }
#endif
#if NCCL_GIN_GPI_ENABLE
    case NCCL_NET_DEVICE_GIN_GPI: {
      const Queue_t& queue = gpi_queue(context);
      const std::uint64_t done = *static_cast<const volatile std::uint64_t*>(&queue.ci_->value);
      return done + (std::uint64_t{1} << queue.log_depth);
    }
#endif
    default:
      return 0;
  }
}

// Puts `num_bytes` from offset `from` of one of this rank's windows to offset `to` of the same
// window of the rail peer in `domain`, and then counts that rank's signal `signal` up by 1, unless
// it is kNoSignal.  Once that is seen there, this put and all earlier ones from here to there are
// in their places.  What is put is what this thread can see now; it stays as it is until the signal
// is seen.  Called by one thread, where the queue has room for it: otherwise NCCL waits without an
// end.
constexpr int kNoSignal = -1;
__device__ inline void put(const Rail& rail, int window, int domain, std::size_t to,
                           std::size_t from, std::size_t num_bytes, int signal) {
  fence_system();
  const ncclGin gin(rail.device, 0);
  const ncclTeam team = ncclTeamRail(rail.device);
  const ncclWindow_t memory = rail.windows[window];
  const ncclGin_StrongSignalInc count{static_cast<ncclGinSignal_t>(signal)};
  if (signal == kNoSignal) {
    gin.put(team, domain, memory, to, memory, from, num_bytes);
  } else if (num_bytes == 0) {
    gin.signal(team, domain, count);
  } else {
    gin.put(team, domain, memory, to, memory, from, num_bytes, count);
  }
}

// How often rail peers have counted this rank's signal up.  What they had put before is visible to
// this thread.
__device__ inline std::uint64_t read_signal(const Rail& rail, int signal) {
  return ncclGin(rail.device, 0).readSignal(static_cast<ncclGinSignal_t>(signal));
}

}  // namespace ncclep::network
