// Routing maps as Megatron's routers make them -> what an engine's plan takes.
#pragma once

#include <cstdint>

namespace ncclep::routes {

struct TopkFromMap {
  const std::uint8_t* routing_map;  // [T, E], 0 or 1
  std::int64_t num_tokens;
  int num_experts, top_k;
  std::int64_t not_routed;        // fills a row up
  std::int64_t too_many_experts;  // all of a row with more than K experts
  std::int64_t* topk_idx;         // [T, K]
};

// Queues it: lists the experts of each row of the map, in ascending order.
void topk_from_map(const TopkFromMap& job, std::uintptr_t stream);

}  // namespace ncclep::routes
