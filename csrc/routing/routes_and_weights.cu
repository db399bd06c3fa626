// One warp for each token; a lane looks at every 32nd expert.
#include <cuda_runtime.h>

#include "common/cuda.h"
#include "routing/routes_and_weights.h"

namespace ncclep::routes {

namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;

__device__ std::int64_t token_of_warp() {
  return static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
}

// The column of an expert, or the expert of a column: the mapping is its own inverse.
__device__ int mirrored(int expert, int block) {
  return block == 1 ? expert : expert / block * block + block - 1 - expert % block;
}

template <typename Bits>
__global__ void routes_and_weights_kernel(RoutesAndWeights job) {
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t token = token_of_warp();
  if (token >= job.num_tokens) return;
  const std::uint8_t* row = job.routing_map + token * job.num_experts;
  std::int64_t* experts = job.topk_idx + token * job.top_k;
  int found = 0;
  for (int first = 0; first < job.num_experts; first += kWarpSize) {
    const int expert = first + lane;
    const bool is_chosen =
        expert < job.num_experts && __ldg(row + mirrored(expert, job.experts_per_block)) != 0;
    const unsigned int chosen = __ballot_sync(~0u, is_chosen);
    const int k = found + __popc(chosen & ((1u << lane) - 1));
    if (is_chosen && k < job.top_k) experts[k] = expert;
    found += __popc(chosen);
  }
  __syncwarp();
  const bool too_many = found > job.top_k;
  const Bits* probs = static_cast<const Bits*>(job.probs) + token * job.num_experts;
  Bits* weights = static_cast<Bits*>(job.weights) + token * job.top_k;
  for (int k = lane; k < job.top_k; k += kWarpSize) {
    const bool is_routed = !too_many && k < found;
    if (!is_routed) experts[k] = too_many ? job.too_many_experts : job.not_routed;
    weights[k] =
        is_routed ? probs[mirrored(static_cast<int>(experts[k]), job.experts_per_block)] : Bits{0};
  }
}

template <typename Bits>
__global__ void probs_gradient_kernel(ProbsGradient job) {
  const std::int64_t token = token_of_warp();
  if (token >= job.num_tokens) return;
  const std::int64_t* experts = job.topk_idx + token * job.top_k;
  const Bits* grad_weights = static_cast<const Bits*>(job.grad_weights) + token * job.top_k;
  Bits* grad_probs = static_cast<Bits*>(job.grad_probs) + token * job.num_experts;
  // A row's experts ascend, so the lane's `k` only increases; negative ones come last.
  int k = 0;
  for (int expert = threadIdx.x % kWarpSize; expert < job.num_experts; expert += kWarpSize) {
    while (k < job.top_k && experts[k] >= 0 && experts[k] < expert) ++k;
    const bool is_chosen = k < job.top_k && experts[k] == expert;
    grad_probs[mirrored(expert, job.experts_per_block)] = is_chosen ? grad_weights[k] : Bits{0};
  }
}

template <typename Job>
void launch(void (*kernel)(Job), const Job& job, std::uintptr_t stream, const char* call) {
  if (job.num_tokens == 0) return;
  const auto num_blocks = static_cast<unsigned int>((job.num_tokens + kWarps - 1) / kWarps);
  kernel<<<num_blocks, kWarps * kWarpSize, 0, reinterpret_cast<cudaStream_t>(stream)>>>(job);
  cuda_check(cudaGetLastError(), call);
}

}  // namespace

void routes_and_weights(const RoutesAndWeights& job, std::uintptr_t stream) {
  const auto kernel = job.itemsize == 2   ? routes_and_weights_kernel<std::uint16_t>
                      : job.itemsize == 4 ? routes_and_weights_kernel<std::uint32_t>
                                          : routes_and_weights_kernel<std::uint64_t>;
  launch(kernel, job, stream, "launching routes_and_weights");
}

void probs_gradient(const ProbsGradient& job, std::uintptr_t stream) {
  const auto kernel = job.itemsize == 2   ? probs_gradient_kernel<std::uint16_t>
                      : job.itemsize == 4 ? probs_gradient_kernel<std::uint32_t>
                                          : probs_gradient_kernel<std::uint64_t>;
  launch(kernel, job, stream, "launching probs_gradient");
}

}  // namespace ncclep::routes
