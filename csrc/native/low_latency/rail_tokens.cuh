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

// `count_sent` for what was done for rail peers, or for one.  In the last CTA all threads then have
// seen what the other CTAs wrote.
__device__ inline unsigned int count_passed(unsigned int* word, bool has_failed) {
  const unsigned int passed = count_sent(word, false, has_failed);
  if (passed != 0) see_other_ctas();
  return passed;
}

// Puts this rank's messages, which all CTAs have written, to the rail peers.  Called by all threads
// of the CTA that has seen that; false for a thread that could not.
template <typename R>
__device__ bool put_messages(const KernelContext& me, const R& rails, const LowLatencyContext& ll,
                             const DomainPlaces& domains, int num_tokens, std::uint32_t bad_routing,
                             std::uint64_t epoch) {
  const int domain = threadIdx.x;
  if (!has_rail_peer(me, domain)) return true;
  const std::size_t from = ll.window.sent_message(domain);
  const int number = domains.count(domain, num_tokens);
  auto* head = reinterpret_cast<std::uint64_t*>(ll.window_of[me.rank] + from);
  head[0] = number;
  head[1] = bad_routing;
  return put(me, rails, Phase::kLowLatencyDispatch, epoch, kLowLatencyWindow, domain,
             ll.window.message(me.control.domain_of(me.rank)), from,
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

constexpr int kDomainWords = kMaxDomains / 32;
static_assert(kDomainWords == 2, "the bits of a std::uint64_t");

// Waits until rail peers in some of the domains `left`, a bit for each, have counted `signal` up to
// `goal`; returns these domains, or 0 when the group has failed.  Called by all threads of a CTA;
// another barrier must follow before the next call.
template <typename R>
__device__ std::uint64_t wait_for_some(const KernelContext& me, const R& rails, Phase phase,
                                       RailSignal signal, std::uint64_t goal, std::uint64_t number,
                                       std::uint64_t left) {
  __shared__ unsigned int come[kDomainWords];
  __shared__ int is_any;
  const int domain = threadIdx.x;
  if (domain < kDomainWords) come[domain] = 0;
  if (domain == 0) is_any = 0;
  __syncthreads();
  bool is_good = true;
  if (domain < kMaxDomains && (left >> domain & 1) != 0) {
    bool is_here = false;
    is_good = wait_until(me, phase, rail_peer_in(me, domain), number, [&] {
      is_here = has_counted(me, rails, signal, domain, goal);
      return is_here || look(&is_any) != 0;
    });
    if (is_here) {
      atomicOr(come + domain / 32, 1u << domain % 32);
      show(&is_any, 1);
    }
  }
  if (!__syncthreads_and(is_good)) return 0;
  return come[0] | std::uint64_t{come[1]} << 32;
}

// Sends the tokens of one rail peer on to the ranks of this domain, as their source would, with its
// words.  Called by all threads of all CTAs; returns what `count_sent` does.
__device__ inline unsigned int pass_on(const KernelContext& me, const LowLatencyContext& ll,
                                       int domain, Places& places, std::uint64_t number,
                                       bool has_failed) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_local = me.control.num_local(), locals = me.control.local_ranks();
  const int pieces = (window.row_bytes + kLlPiece - 1) / kLlPiece;
  const int source = rail_peer_in(me, domain);
  std::uint32_t word = 0;
  if (!has_failed) {
    const Message message(me, ll, domain);
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
      word = places.count(threadIdx.x, message.num_tokens) | message.bad_routing;
    }
  }
  const unsigned int passed = count_passed(ll.state->passed_on + domain, has_failed);
  if (passed == 0) return 0;
  if (passed < kSentFailed && threadIdx.x < locals) {
    fence_system();  // passes on what this thread has seen
    post_numbered(sent_word(ll, local_rank(me, threadIdx.x), Turn::kDispatch, source), number,
                  word);
  }
  return passed;
}

// Sends the tokens that rail peers have put here on to the ranks of this domain, those that have
// come first: a rank that waits for the words then misses only ranks that have put nothing.  Called
// by all threads of all CTAs; returns what `count_sent` does.
template <typename R>
__device__ unsigned int pass_tokens_on(const KernelContext& me, const R& rails,
                                       const LowLatencyContext& ll, Places& places,
                                       std::uint64_t goal, std::uint64_t number, bool has_failed) {
  const int num_domains = me.control.num_domains;
  std::uint64_t left = (~std::uint64_t{0} >> (kMaxDomains - num_domains)) &
                       ~(std::uint64_t{1} << me.control.domain_of(me.rank));
  unsigned int passed = 0;  // all domains; in the last CTA only
  while (left != 0) {
    std::uint64_t come = has_failed ? 0
                                    : wait_for_some(me, rails, Phase::kLowLatencyDispatch,
                                                    kTokensPut, goal, number, left);
    if (come == 0) {
      has_failed = true;
      come = left;
    }
    left &= ~come;
    for (; come != 0; come &= come - 1) {
      const unsigned int by_all = pass_on(me, ll, __ffsll(come) - 1, places, number, has_failed);
      if (by_all == 0) continue;
      passed = count_sent(&ll.state->domains_passed, false, by_all >= kSentFailed, num_domains - 1);
    }
  }
  return passed;
}

}  // namespace ncclep::native
