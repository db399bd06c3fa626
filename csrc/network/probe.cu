#include <cuda_runtime.h>

#include "common/cuda.h"
#include "common/order.cuh"
#include "network/probe.h"

#ifdef NCCLEP_NCCL_HEADERS

#include "network/rail.cuh"

namespace ncclep::network {

namespace {

constexpr int kThreads = 64;  // one for each rail peer

__global__ void probe_kernel(Rail rail, Probe job) {
  const int peer = threadIdx.x;
  if (peer >= job.num_domains || peer == job.domain) return;
  const int sent = static_cast<int>(job.round % 2) * 2 * job.num_domains;
  const int arrived = sent + job.num_domains;
  job.window[sent + peer] = job.words[peer];
  const std::uint64_t start = now_ns();
  std::uint64_t signals = 0;
  bool is_put = false;
  const std::uint64_t end = places_taken(rail, peer) + places_of(rail, sizeof(std::uint64_t), true);
  do {
    if (!is_put && (is_put = room_up_to(rail, peer, end) >= end)) {
      put(rail, 0, peer, (arrived + job.domain) * sizeof(std::uint64_t),
          (sent + peer) * sizeof(std::uint64_t), sizeof(std::uint64_t), job.domain);
    }
    signals = read_signal(rail, peer);
  } while ((!is_put || signals < job.round) &&
           ns_since(start) <= static_cast<std::int64_t>(job.deadline_ns));
  job.arrivals[peer] = {load_relaxed(job.window + arrived + peer), signals, is_put};
}

}  // namespace

void probe(const Rail& rail, const Probe& arguments, std::uintptr_t stream) {
  require(arguments.num_domains <= kThreads, arguments.num_domains, " domains: at most ", kThreads);
  probe_kernel<<<1, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(rail, arguments);
  cuda_check(cudaGetLastError(), "launching puts over the network");
}

}  // namespace ncclep::network

#endif
