// Tokens that rail peers have put here, in dispatch and in combine (protocol.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/warp.cuh"
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
  __device__ Message(const KernelContext& ctx, const LowLatencyContext& ll, int domain)
      : window_(ll.window), start_(ll.window_of[ctx.rank] + ll.window.message(domain)) {
    const auto* head = reinterpret_cast<const std::uint64_t*>(start_);
    num_tokens = static_cast<int>(__ldcg(head));
    bad_routing = static_cast<std::uint32_t>(__ldcg(head + 1));
  }
  __device__ RailToken token(int index) const {
    return {start_ + 16 + index * window_.token_bytes(), window_};
  }
  int num_tokens;
  std::uint32_t bad_routing;

 private:
  const LowLatencyWindow& window_;
  const char* start_;
};

constexpr int kDomainWords = kMaxDomains / 32;
static_assert(kDomainWords == 2, "the bits of a std::uint64_t");

// All domains but this one, a bit for each.
__device__ inline std::uint64_t other_domains(const KernelContext& ctx) {
  return (~std::uint64_t{0} >> (kMaxDomains - ctx.control.num_domains)) &
         ~(std::uint64_t{1} << ctx.control.domain_of(ctx.rank));
}

// The messages of as many rail peers as have room together, for a CTA to work on at a time: their
// tokens lie one after the other, domain by domain.  CTAs share the pieces of the tokens of each
// domain, because they may have other domains in a batch.  In shared memory.
struct TokenBatch {
  int pieces;                  // of a token
  int end;                     // of the domains that are in it
  int first[kMaxDomains + 1];  // token of each domain
  int mine[kMaxDomains + 1];   // pieces of this CTA before those of each domain
  std::uint8_t domain_of[kLowLatencyTokens];
  RowsToRanks rows;

  // Takes the first of the domains `left`, a bit for each, and returns the others.  Called by all
  // threads.
  __device__ std::uint64_t take(const KernelContext& ctx, const LowLatencyContext& ll,
                                std::uint64_t left, int num_bytes) {
    __syncthreads();  // the last batch is over
    if (threadIdx.x < 32) {
      int up_to = 0, mine_up_to = 0, num_domains = 0;
      pieces = (num_bytes + kLlPiece - 1) / kLlPiece;
      first[0] = mine[0] = 0;
      for (int domain = threadIdx.x; domain < kMaxDomains; domain += 32) {
        const bool is_left = left >> domain & 1;
        const int number = is_left ? Message(ctx, ll, domain).num_tokens : 0;
        const int others = number * pieces - first_piece(domain) + gridDim.x - 1;
        up_to = __shfl_sync(~0u, up_to, 31) + warp_scan(number);
        mine_up_to = __shfl_sync(~0u, mine_up_to, 31) +
                     warp_scan(max(0, others) / static_cast<int>(gridDim.x));
        first[domain + 1] = up_to;
        mine[domain + 1] = mine_up_to;
        num_domains += __popc(__ballot_sync(~0u, up_to <= kLowLatencyTokens));
      }
      end = num_domains;
    }
    __syncthreads();
    const int token = threadIdx.x;
    std::uint32_t ranks = 0;
    if (token < num_tokens()) {
      domain_of[token] = static_cast<std::uint8_t>(last_up_to(first, token));
      const RailToken here = token_at(ctx, ll, token);
      for (int k = 0; k < ll.window.top_k; ++k) {
        const int expert = here.expert(k);
        if (expert >= 0) ranks |= 1u << expert / ctx.control.num_local();
      }
    }
    rows.set(ranks, num_tokens(), ctx.control.local_ranks());
    __syncthreads();
    return end == kMaxDomains ? 0 : left >> end << end;
  }

  __device__ int num_tokens() const { return first[end]; }
  // The pieces that this CTA has, and of which token one is, and which of it.
  __device__ int num_mine() const { return mine[end]; }
  struct Piece {
    int token, number;
  };
  __device__ Piece find_mine(int i) const {
    const int domain = last_up_to(mine, i);
    const int number = first_piece(domain) + (i - mine[domain]) * gridDim.x;
    return {first[domain] + number / pieces, number % pieces};
  }
  __device__ RailToken token_at(const KernelContext& ctx, const LowLatencyContext& ll,
                                int token) const {
    return Message(ctx, ll, domain_of[token]).token(index_of(token));
  }
  // Among those of its domain.
  __device__ int index_of(int token) const { return token - first[domain_of[token]]; }
  __device__ int row_index(int rank, int token) const {
    return rows.index(rank, token) - rows.index(rank, first[domain_of[token]]);
  }
  // How many tokens of a domain go to a rank.
  __device__ int count(int rank, int domain) const {
    const int last = first[domain + 1] - 1;
    return last < first[domain] ? 0 : row_index(rank, last) + (rows.ranks_of[last] >> rank & 1);
  }

 private:
  // A CTA has every gridDim.x-th piece of a domain, from this one on: another one in each domain.
  __device__ static int first_piece(int domain) { return (blockIdx.x + domain) % gridDim.x; }
  // The last domain that begins at `i` or before.
  __device__ static int last_up_to(const int* begin, int i) {
    int domain = 0;
    for (int step = kMaxDomains / 2; step > 0; step /= 2) {
      if (begin[domain + step] <= i) domain += step;
    }
    return domain;
  }
};

// Puts this rank's messages, which all CTAs have written, to the rail peers.  Called by all threads
// of the CTA that has seen that; false for a thread that could not.
template <typename R>
__device__ bool put_messages(const KernelContext& ctx, const R& rails, const LowLatencyContext& ll,
                             const RowsToDomains& domains, int num_tokens,
                             std::uint32_t bad_routing, std::uint64_t epoch) {
  const int domain = threadIdx.x;
  if (!has_rail_peer(ctx, domain)) return true;
  const std::size_t from = ll.window.sent_message(domain);
  const int number = domains.count(domain, num_tokens);
  auto* head = reinterpret_cast<std::uint64_t*>(ll.window_of[ctx.rank] + from);
  head[0] = number;
  head[1] = bad_routing;
  return put(ctx, rails, Phase::kLowLatencyDispatch, epoch, kLowLatencyWindow, domain,
             ll.window.message(ctx.control.domain_of(ctx.rank)), from,
             ll.window.message_bytes(number), kTokensPut);
}

// Waits until all rail peers have counted `signal` up to `goal`; false, for the whole CTA, when the
// group has failed.
template <typename R>
__device__ bool wait_for_rail_peers(const KernelContext& ctx, const R& rails, Phase phase,
                                    RailSignal signal, std::uint64_t goal, std::uint64_t number) {
  bool arrived = true;
  if (has_rail_peer(ctx, threadIdx.x)) {
    arrived = wait_for_signals(ctx, rails, phase, signal, threadIdx.x, goal, number);
  }
  return __syncthreads_and(arrived);
}

// Waits until rail peers in some of the domains `left`, a bit for each, have counted `signal` up to
// `goal`; returns these domains, or 0 when the group has failed.  Called by all threads of a CTA;
// another barrier must follow before the next call.
template <typename R>
__device__ std::uint64_t wait_for_some(const KernelContext& ctx, const R& rails, Phase phase,
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
    bool arrived = false;
    is_good = wait_until(ctx, phase, rail_peer_in(ctx, domain), number, [&] {
      arrived = has_counted(ctx, rails, signal, domain, goal);
      return arrived || look(&is_any) != 0;
    });
    if (arrived) {
      atomicOr(come + domain / 32, 1u << domain % 32);
      show(&is_any, 1);
    }
  }
  if (!__syncthreads_and(is_good)) return 0;
  return come[0] | std::uint64_t{come[1]} << 32;
}

// Sends the tokens of a batch on to the ranks of this domain, as their sources would.  Called by
// all threads of all CTAs.
__device__ inline void pass_on(const KernelContext& ctx, const LowLatencyContext& ll,
                               const TokenBatch& batch) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_local = ctx.control.num_local(), locals = ctx.control.local_ranks();
  for (int i = warp; i < batch.num_mine(); i += kLlWarps) {
    const auto [number, piece] = batch.find_mine(i);
    const int source = rail_peer_in(ctx, batch.domain_of[number]);
    const RailToken token = batch.token_at(ctx, ll, number);
    const int offset = piece * kLlPiece + lane * 16;
    Part part;
    part.load(token.row(), offset, window.row_bytes);
    const int expert = lane < window.top_k ? token.expert(lane) : -1;
    const float weight = lane < window.top_k ? token.weight(lane) : 0;
    const int own_index = lane < locals ? batch.row_index(lane, number) : 0;
    for (std::uint32_t left = batch.rows.ranks_of[number]; left != 0; left &= left - 1) {
      const int rank = __ffs(left) - 1, index = __shfl_sync(~0u, own_index, rank);
      char* to = ll.window_of[rank_at(ctx, rank)];
      const std::size_t row = row_at(window, source, index);
      part.store(to + window.rows() + row * window.row_bytes, offset, window.row_bytes);
      if (piece != 0) continue;
      store_assignments(window, to, row, rank, num_local, expert, weight);
      const auto* scales = reinterpret_cast<const uint4*>(token.scales());
      auto* to_scales = reinterpret_cast<uint4*>(to + window.scales() + row * window.scale_bytes);
      for (int s = lane; s < window.scale_bytes / 16; s += 32) to_scales[s] = __ldcg(scales + s);
    }
  }
}

// Called by all threads of a CTA that has sent its part of a batch, of these domains, on: counts
// each of them, and gives the words of those sources whose other parts all CTAs have sent on.
// Returns what `count_sent` does when all CTAs have done so for all domains.
__device__ inline unsigned int count_passed(const KernelContext& ctx, const LowLatencyContext& ll,
                                            const TokenBatch& batch, std::uint64_t domains,
                                            std::uint64_t number, bool has_failed) {
  __shared__ unsigned int by_all[kMaxDomains];  // the sums of those that are complete
  __shared__ unsigned int sum;
  const int domain = threadIdx.x, locals = ctx.control.local_ranks();
  __syncthreads();
  unsigned int mine = 0;
  if (domain < kMaxDomains) {
    by_all[domain] = 0;
    if (domains >> domain & 1) {
      mine = count_in(ll.state->passed_on + domain, kSentCta + has_failed * kSentFailed, gridDim.x);
      if (mine != 0) fence_system();
      by_all[domain] = mine;
    }
  }
  if (__syncthreads_or(mine != 0) == 0) return 0;
  for (int i = threadIdx.x; i < ctx.control.num_domains * locals; i += kLlThreads) {
    const int of = i / locals, local_rank = i % locals, source = rail_peer_in(ctx, of);
    if (by_all[of] == 0 || by_all[of] >= kSentFailed) continue;
    fence_system();  // passes on what this thread has seen
    post_numbered(sent_word(ll, rank_at(ctx, local_rank), Turn::kDispatch, source), number,
                  batch.count(local_rank, of) | Message(ctx, ll, of).bad_routing);
  }
  if (threadIdx.x < 32) {
    unsigned int complete = 0;
    for (int of = threadIdx.x; of < kMaxDomains; of += 32) {
      if (by_all[of] != 0) complete += kSentCta + (by_all[of] >= kSentFailed) * kSentFailed;
    }
    complete = warp_sum(complete);
    if (threadIdx.x == 0) {
      sum = count_in(&ll.state->domains_passed, complete, ctx.control.num_domains - 1);
    }
  }
  __syncthreads();
  return sum;
}

// Sends the tokens that rail peers have put here on to the ranks of this domain, those that have
// come first: a rank that waits for the words then misses only ranks that have put nothing.  Called
// by all threads of all CTAs; returns what `count_sent` does.
template <typename R>
__device__ unsigned int pass_tokens_on(const KernelContext& ctx, const R& rails,
                                       const LowLatencyContext& ll, TokenBatch& batch,
                                       std::uint64_t goal, std::uint64_t number, bool has_failed) {
  std::uint64_t left = other_domains(ctx);
  unsigned int passed = 0;  // all domains; in the last CTA only
  while (left != 0) {
    std::uint64_t come = has_failed ? 0
                                    : wait_for_some(ctx, rails, Phase::kLowLatencyDispatch,
                                                    kTokensPut, goal, number, left);
    if (come == 0) {
      has_failed = true;
      come = left;
    }
    left &= ~come;
    while (come != 0) {
      const std::uint64_t others = has_failed ? 0 : batch.take(ctx, ll, come, ll.window.row_bytes);
      if (!has_failed) pass_on(ctx, ll, batch);
      passed = count_passed(ctx, ll, batch, come & ~others, number, has_failed);
      come = others;
    }
  }
  return passed;
}

}  // namespace ncclep::native
