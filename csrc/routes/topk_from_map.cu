// One warp for each token; a lane looks at every 32nd expert.
#include <cuda_runtime.h>

#include "common/cuda.h"
#include "routes/topk_from_map.h"

namespace ncclep::routes {

namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;

__global__ void topk_from_map_kernel(TopkFromMap job) {
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t token =
      static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (token >= job.num_tokens) return;
  const std::uint8_t* row = job.routing_map + token * job.num_experts;
  std::int64_t* experts = job.topk_idx + token * job.top_k;
  int found = 0;
  for (int first = 0; first < job.num_experts; first += kWarpSize) {
    const int expert = first + lane;
    const bool is_chosen = expert < job.num_experts && row[expert] != 0;
    const unsigned int chosen = __ballot_sync(~0u, is_chosen);
    const int place = found + __popc(chosen & ((1u << lane) - 1));
    if (is_chosen && place < job.top_k) experts[place] = expert;
    found += __popc(chosen);
  }
  __syncwarp();
  const bool too_many = found > job.top_k;
  for (int place = (too_many ? 0 : found) + lane; place < job.top_k; place += kWarpSize) {
    experts[place] = too_many ? job.too_many_experts : job.not_routed;
  }
}

}  // namespace

void topk_from_map(const TopkFromMap& job, std::uintptr_t stream) {
  if (job.num_tokens == 0) return;
  const auto num_blocks = static_cast<unsigned int>((job.num_tokens + kWarps - 1) / kWarps);
  topk_from_map_kernel<<<num_blocks, kWarps * kWarpSize, 0,
                         reinterpret_cast<cudaStream_t>(stream)>>>(job);
  cuda_check(cudaGetLastError(), "launching topk_from_map");
}

}  // namespace ncclep::routes
