// Tokens that rail peers have put here, in dispatch and in combine (protocol.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/low_latency/operation.cuh"

namespace ncclep::native {

// One token of a message.
struct RailToken {
  const char* start;
  const LowLatencyWindow& window;

  __device__ std::int32_t expert(int k) const {
    return __ldcg(reinterpret_cast<const std::int32_t*>(start) + k);
  }
  __device__ float weight(int k) const {
    return __ldcg(reinterpret_cast<const float*>(start) + window.top_k + k);
  }
  __device__ const char* scales() const { return start + window.header_bytes(); }
  __device__ const char* row() const { return scales() + window.scale_bytes; }
};

// After `count_sent` in the last CTA: makes what the other CTAs wrote before visible to all
// threads.
__device__ inline void see_other_ctas() {
  if (threadIdx.x == 0) fence_system();
  __syncthreads();
}

// What the rail peer in `domain` has put.
class Message {
 public:
  __device__ Message(const KernelContext& me, const LowLatencyContext& ll, int domain)
      : window_(ll.window), start_(ll.window_of[me.rank] + ll.window.message(domain)) {
    const auto* head = reinterpret_cast<const std::uint64_t*>(start_);
    num_tokens = static_cast<int>(__ldcg(head));
    bad_routing = static_cast<std::uint32_t>(__ldcg(head + 1));
  }
  __device__ RailToken token(int index) const {
    return {start_ + 16 + index * window_.token_bytes(), window_};
  }
  // Finds the ranks of this domain, by place, that the tokens go to.  Called by all threads of a
  // CTA; a barrier before and after.
  __device__ void find_places(const KernelContext& me, Places& places) const {
    const int index = threadIdx.x, num_local = me.control.num_local();
    std::uint32_t ranks = 0;
    if (index < num_tokens) {
      for (int k = 0; k < window_.top_k; ++k) {
        const int expert = token(index).expert(k);
        if (expert >= 0) ranks |= 1u << expert / num_local;
      }
    }
    __syncthreads();
    places.set(ranks, num_tokens, me.control.local_ranks());
    __syncthreads();
  }

  int num_tokens;
  std::uint32_t bad_routing;

 private:
  const LowLatencyWindow& window_;
  const char* start_;
};

// `count_sent` for what was done for the rail peers.  In the last CTA all threads then have seen
// what the other CTAs wrote.
__device__ inline unsigned int count_passed(const LowLatencyContext& ll, bool has_failed) {
  const unsigned int passed = count_sent(&ll.state->passed, false, has_failed);
  if (passed != 0) see_other_ctas();
  return passed;
}

// Puts this rank's messages, which all CTAs have written, to the rail peers.  Called by all threads
// of the CTA that has seen that.
template <typename R>
__device__ void put_messages(const KernelContext& me, const R& rails, const LowLatencyContext& ll,
                             const DomainPlaces& domains, int num_tokens,
                             std::uint32_t bad_routing) {
  const int domain = threadIdx.x;
  if (!has_rail_peer(me, domain)) return;
  const std::size_t from = ll.window.sent_message(domain);
  const int number = domains.count(domain, num_tokens);
  auto* head = reinterpret_cast<std::uint64_t*>(ll.window_of[me.rank] + from);
  head[0] = number;
  head[1] = bad_routing;
  put(me, rails, kLowLatencyWindow, domain, ll.window.message(me.control.domain_of(me.rank)), from,
      ll.window.message_bytes(number), kTokensPut);
}

// Waits until all rail peers have counted `signal` up to `goal`; false, for the whole CTA, when the
// group has failed.
template <typename R>
__device__ bool wait_for_rail_peers(const KernelContext& me, const R& rails, Phase phase,
                                    RailSignal signal, std::uint64_t goal, std::uint64_t number) {
  bool is_here = true;
  if (has_rail_peer(me, threadIdx.x)) {
    is_here = wait_for_signals(me, rails, phase, signal, threadIdx.x, goal, number);
  }
  return __syncthreads_and(is_here);
}

// Sends the tokens that rail peers have put here on to the ranks of this domain, as their sources
// would, with their words.  Called by all threads of all CTAs; returns what `count_sent` does.
template <typename R>
__device__ unsigned int pass_tokens_on(const KernelContext& me, const R& rails,
                                       const LowLatencyContext& ll, Places& places,
                                       std::uint64_t goal, std::uint64_t number, bool has_failed) {
  __shared__ int counts[kMaxRanks];
  __shared__ std::uint32_t bad_routing[kMaxDomains];
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_local = me.control.num_local(), locals = me.control.local_ranks();
  const int pieces = (window.row_bytes + kLlPiece - 1) / kLlPiece;
  has_failed = has_failed || !wait_for_rail_peers(me, rails, Phase::kLowLatencyDispatch, kTokensPut,
                                                  goal, number);
  for (int domain = 0; domain < me.control.num_domains; ++domain) {
    if (has_failed || domain == me.control.domain_of(me.rank)) continue;
    const Message message(me, ll, domain);
    const int source = rail_peer_in(me, domain);
    message.find_places(me, places);
    for (int i = warp * gridDim.x + blockIdx.x; i < message.num_tokens * pieces;
         i += gridDim.x * kLlWarps) {
      const RailToken token = message.token(i / pieces);
      const int offset = i % pieces * kLlPiece + lane * 16;
      Part part;
      part.load(token.row(), offset, window.row_bytes);
      const int expert = lane < window.top_k ? token.expert(lane) : -1;
      const float weight = lane < window.top_k ? token.weight(lane) : 0;
      const int own_place = lane < locals ? places.place(lane, i / pieces) : 0;
      for (std::uint32_t left = places.ranks_of[i / pieces]; left != 0; left &= left - 1) {
        const int rank = __ffs(left) - 1, place = __shfl_sync(~0u, own_place, rank);
        char* to = ll.window_of[local_rank(me, rank)];
        const std::size_t row = row_at(window, source, place);
        part.store(to + window.rows() + row * window.row_bytes, offset, window.row_bytes);
        if (i % pieces != 0) continue;
        store_assignments(window, to, row, rank, num_local, expert, weight);
        const auto* scales = reinterpret_cast<const uint4*>(token.scales());
        auto* to_scales = reinterpret_cast<uint4*>(to + window.scales() + row * window.scale_bytes);
        for (int s = lane; s < window.scale_bytes / 16; s += 32) to_scales[s] = __ldcg(scales + s);
      }
    }
    if (threadIdx.x < locals) {
      counts[domain * locals + threadIdx.x] = places.count(threadIdx.x, message.num_tokens);
    }
    if (threadIdx.x == 0) bad_routing[domain] = message.bad_routing;
  }
  const unsigned int passed = count_passed(ll, has_failed);
  if (passed == 0 || passed >= kSentFailed) return passed;
  fence_system();  // passes on what this thread has seen
  for (int i = threadIdx.x; i < window.num_ranks; i += kLlThreads) {
    const int domain = i / locals, to = local_rank(me, i % locals);
    if (!has_rail_peer(me, domain)) continue;
    post_numbered(sent_word(ll, to, Turn::kDispatch, rail_peer_in(me, domain)), number,
                  counts[i] | bad_routing[domain]);
  }
  return passed;
}

}  // namespace ncclep::native
