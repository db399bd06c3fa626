// Converts routing maps and probabilities of Megatron's routers into the arguments of an engine's
// plan and dispatch, and computes the gradient of the probabilities.
//
// Numbers are only copied, never computed with, so only the size of their dtype matters.
#pragma once

#include <cstdint>

namespace ncclep::routes {

struct RoutesAndWeights {
  const std::uint8_t* routing_map;  // [T, E], 0 or 1
  const void* probs;                // [T, E]
  std::int64_t num_tokens;
  int num_experts, top_k;
  int experts_per_block;  // experts are numbered backwards in blocks of this size; 1: in the usual
                          // order
  int itemsize;           // bytes of a probability and of a weight: 2, 4 or 8
  std::int64_t not_routed;        // fills the rest of a row
  std::int64_t too_many_experts;  // fills every slot of a row with more than K experts
  std::int64_t* topk_idx;         // [T, K]
  void* weights;                  // [T, K]
};

// Queues a kernel that lists the experts of each row of the map, in ascending order of their
// numbers, and the row's probabilities for them; zero where there is no expert.
void routes_and_weights(const RoutesAndWeights& job, std::uintptr_t stream);

struct ProbsGradient {
  const std::int64_t* topk_idx;  // [T, K], as `routes_and_weights` wrote it
  const void* grad_weights;      // [T, K]
  std::int64_t num_tokens;
  int num_experts, top_k;
  int experts_per_block;  // as above
  int itemsize;           // bytes of a gradient: 2, 4 or 8
  void* grad_probs;       // [T, E]
};

// Queues a kernel that copies the gradient of each weight to its probability, and writes zero to
// the others.
void probs_gradient(const ProbsGradient& job, std::uintptr_t stream);

}  // namespace ncclep::routes
