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

// Puts `num_bytes` from offset `from` of one of this rank's windows to offset `to` of the same
// window of the rail peer in `domain`, and then counts that rank's signal `signal` up by 1, unless
// it is kNoSignal.  Once that is seen there, this put and all earlier ones from here to there are
// in their places.  What is put is what this thread can see now; it stays as it is until the signal
// is seen.  Called by one thread; waits without an end while NCCL's queue to that peer is full
// (docs/network.md).
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
