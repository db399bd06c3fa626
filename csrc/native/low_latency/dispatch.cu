// Low-latency dispatch: the source rank writes rows straight into the windows of the ranks that
// hold their experts (protocol.h).
//
// Example: two ranks, four experts, top-2; rank 1 holds experts 2 and 3.  Rank 0's tokens 0, 1, 2
// name experts (0, 1), (3, 0), (2, 3).  Rank 1 gets two rows from rank 0: token 1 at index 0, with
// experts (1, -1), and token 2 at index 1, with experts (0, 1).
#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/low_latency/operation.cuh"
#include "native/low_latency/rail_tokens.cuh"

namespace ncclep::native {

namespace {

__device__ std::int64_t expert_at(const LowLatencyDispatch& job, int assignment) {
  if (job.is_int64) return static_cast<const std::int64_t*>(job.topk_idx)[assignment];
  return static_cast<const std::int32_t*>(job.topk_idx)[assignment];
}

__device__ bool is_expert(const KernelContext& ctx, std::int64_t expert) {
  return expert >= 0 && expert < ctx.control.num_experts;
}

// Where the token with this thread's number goes, one bit each.
struct Destinations {
  std::uint32_t ranks = 0;    // of this domain, by local rank
  std::uint64_t domains = 0;  // other ones
};

template <typename R>
__device__ Destinations find_destinations(const KernelContext& ctx, const LowLatencyDispatch& job,
                                          int top_k) {
  const int token = threadIdx.x, num_local = ctx.control.num_local();
  Destinations found;
  if (token >= job.num_tokens) return found;
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) {
    const std::int64_t expert = expert_at(job, token * top_k + k);
    if (!is_expert(ctx, expert)) continue;
    const int rank = static_cast<int>(expert) / num_local;
    if (!R::kEnabled || is_local(ctx, rank)) {
      found.ranks |= 1u << local_rank(ctx, rank);
    } else {
      found.domains |= std::uint64_t{1} << ctx.control.domain_of(rank);
    }
  }
  return found;
}

// A token of the message to the rail peer in `domain`.
__device__ char* sent_token(const KernelContext& ctx, const LowLatencyContext& ll, int domain,
                            int index) {
  return ll.window_of[ctx.rank] + ll.window.sent_message(domain) + 16 +
         index * ll.window.token_bytes();
}

// Sends a token's experts and weights, and the scales of its row, to all of `ranks`, and writes
// them into the messages to `domains`.  Called by one warp, whose lane r holds the row's index at
// the r-th rank of this domain.  False if the token's routing is bad: invalid assignments count as
// not routed.
template <typename R>
__device__ bool send_header(const KernelContext& ctx, const LowLatencyContext& ll,
                            const LowLatencyDispatch& job, int token, std::uint32_t ranks,
                            int own_index, const RowsToDomains& domains) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, num_local = ctx.control.num_local();
  std::int64_t named = -1;
  float weight = 0;
  if (lane < window.top_k) {
    named = expert_at(job, token * window.top_k + lane);
    weight = job.weights[token * window.top_k + lane];
  }
  int expert = is_expert(ctx, named) ? static_cast<int>(named) : -1;
  bool is_good = expert == named || named == -1;
  // If an expert is named twice, its first assignment counts.
  const std::uint32_t same = __match_any_sync(~0u, expert);
  if (expert >= 0 && (same & ((1u << lane) - 1)) != 0) {
    is_good = false;
    expert = -1;
  }
  const int scale_vectors = window.scale_bytes / 16;
  const auto* scales =
      reinterpret_cast<const uint4*>(job.scales) + static_cast<std::size_t>(token) * scale_vectors;
  for (std::uint32_t left = ranks; left != 0; left &= left - 1) {
    const int of = __ffs(left) - 1, rank = rank_at(ctx, of);
    char* to = ll.window_of[rank];
    const std::size_t row = row_at(window, ctx.rank, __shfl_sync(~0u, own_index, of));
    store_assignments(window, to, row, rank, num_local, expert, weight);
    auto* to_scales = reinterpret_cast<uint4*>(to + window.scales()) + row * scale_vectors;
    for (int i = lane; i < scale_vectors; i += 32) to_scales[i] = __ldg(scales + i);
  }
  if constexpr (R::kEnabled) {
    const int in_domain = num_local * ctx.control.local_ranks();
    for (std::uint64_t left = domains.ranks_of[token]; left != 0; left &= left - 1) {
      const int domain = __ffsll(left) - 1;
      char* to = sent_token(ctx, ll, domain, domains.index(domain, token));
      if (lane < window.top_k) {
        const bool is_its = expert >= 0 && expert / in_domain == domain;
        reinterpret_cast<std::int32_t*>(to)[lane] = is_its ? expert % in_domain : -1;
        reinterpret_cast<float*>(to)[window.top_k + lane] = is_its ? weight : 0;
      }
      auto* to_scales = reinterpret_cast<uint4*>(to + window.header_bytes());
      for (int i = lane; i < scale_vectors; i += 32) to_scales[i] = __ldg(scales + i);
    }
  }
  return is_good;
}

// Sends this CTA's share.  False for a thread that has found a bad routing.
template <typename R>
__device__ bool send_rows(const KernelContext& ctx, const LowLatencyContext& ll,
                          const LowLatencyDispatch& job, const RowsToRanks& rows,
                          const RowsToDomains& domains) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pieces = (window.row_bytes + kLlPiece - 1) / kLlPiece;
  bool is_good = true;
  for (int i = warp * gridDim.x + blockIdx.x; i < job.num_tokens * pieces;
       i += gridDim.x * kLlWarps) {
    const int token = i / pieces, offset = i % pieces * kLlPiece + lane * 16;
    const char* from = job.x + static_cast<std::size_t>(token) * window.row_bytes + offset;
    Part part;
#pragma unroll
    for (int v = 0; v < kLlVectors; ++v) {
      if (offset + v * kLlStride < window.row_bytes) {
        part.vectors[v] = __ldg(reinterpret_cast<const uint4*>(from + v * kLlStride));
      }
    }
    const std::uint32_t ranks = rows.ranks_of[token];
    const int own_index = lane < ctx.control.local_ranks() ? rows.index(lane, token) : 0;
    for (std::uint32_t left = ranks; left != 0; left &= left - 1) {
      const int of = __ffs(left) - 1, index = __shfl_sync(~0u, own_index, of);
      char* to = ll.window_of[rank_at(ctx, of)] + window.rows() +
                 row_at(window, ctx.rank, index) * window.row_bytes;
      part.store(to, offset, window.row_bytes);
    }
    if constexpr (R::kEnabled) {
      for (std::uint64_t left = domains.ranks_of[token]; left != 0; left &= left - 1) {
        const int domain = __ffsll(left) - 1;
        char* to = sent_token(ctx, ll, domain, domains.index(domain, token)) +
                   window.header_bytes() + window.scale_bytes;
        part.store(to, offset, window.row_bytes);
      }
    }
    if (i % pieces == 0) {
      is_good &= send_header<R>(ctx, ll, job, token, ranks, own_index, domains);
    }
  }
  return is_good;
}

// Waits for all ranks' rows.  Called by one CTA.
template <typename R>
__device__ void receive(const KernelContext& ctx, const LowLatencyContext& ll,
                        const LowLatencyDispatch& job, std::uint64_t number, bool has_failed) {
  __shared__ int counts[kMaxRanks];
  __shared__ int cleared[kMaxRanks];
  __shared__ unsigned int bad_ranks[kRankWords];
  const LowLatencyWindow& window = ll.window;
  if (threadIdx.x < kRankWords) bad_ranks[threadIdx.x] = 0;
  __syncthreads();
  const auto wait = [&](bool for_local) {
    for (int rank = threadIdx.x; rank < window.num_ranks && !has_failed; rank += kLlThreads) {
      if (R::kEnabled && is_local(ctx, rank) != for_local) continue;
      const int were_cleared = R::kEnabled ? ll.state->cleared[rank] : 0;  // loaded while it waits
      const std::int64_t word =
          wait_for_numbered<load_acquire>(ctx, Phase::kLowLatencyDispatch, rank, number,
                                          sent_word(ll, ctx.rank, Turn::kDispatch, rank), number);
      has_failed = word < 0;
      counts[rank] = static_cast<int>(word & (kBadRouting - 1));
      if (R::kEnabled) cleared[rank] = were_cleared;
      if (!has_failed && (word & kBadRouting)) {
        atomicOr(bad_ranks + rank / 32, 1u << rank % 32);
      }
    }
    has_failed = __syncthreads_or(has_failed);
  };
  wait(true);
  // Only then those of other domains: who is missing in this one has not sent its rail peers' words
  // on either, and is the one to name.
  if constexpr (R::kEnabled) wait(false);
  if (threadIdx.x < kRankWords && bad_ranks[threadIdx.x] != 0) {
    ctx.mailbox->bad_low_latency.words[threadIdx.x] |= bad_ranks[threadIdx.x];
  }
  for (int rank = threadIdx.x; rank < window.num_ranks; rank += kLlThreads) {
    job.counts[rank] = has_failed ? 0 : counts[rank];
  }
  // Where no row was received there are no experts.
  char* own = ll.window_of[ctx.rank];
  const int of_rank = window.max_tokens * window.top_k;
  auto* experts = reinterpret_cast<std::int32_t*>(own + window.experts());
  if constexpr (R::kEnabled) {
    // There may be many: only those are cleared that received one in an earlier dispatch.
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x - lane; first < window.num_ranks; first += kLlThreads) {
      int begin = 0, end = 0;
      if (first + lane < window.num_ranks) {
        begin = has_failed ? 0 : counts[first + lane];
        end = window.max_tokens - (has_failed ? 0 : cleared[first + lane]);
        ll.state->cleared[first + lane] = window.max_tokens - begin;
      }
      for (std::uint32_t left = __ballot_sync(~0u, begin < end); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1, last = __shfl_sync(~0u, end, from) * window.top_k;
        int i = __shfl_sync(~0u, begin, from) * window.top_k + lane;
        for (; i < last; i += 32) experts[(first + from) * of_rank + i] = -1;
      }
    }
  } else {
    for (int from = 0; from < window.num_ranks; ++from, experts += of_rank) {
      const int end = has_failed ? 0 : counts[from] * window.top_k;
      for (int i = end + threadIdx.x; i < of_rank; i += kLlThreads) experts[i] = -1;
    }
  }
  if (has_failed) {
    fill_nan(own + window.weights(), window.num_rows() * window.top_k * sizeof(float));
  }
}

template <typename R>
__global__ void __launch_bounds__(kLlThreads, 1)
    ll_dispatch_kernel(KernelContext ctx, LowLatencyContext ll, LowLatencyDispatch job,
                       const __grid_constant__ R rails) {
  __shared__ RowsToRanks rows;
  __shared__ RowsToDomains domains;
  __shared__ TokenBatch batch;  // of other domains
  __shared__ int counts[kWarpSize];
  const LowLatencyWindow& window = ll.window;
  const Operation now = begin(ctx, ll, Turn::kDispatch, job.sends);
  const auto* state = static_cast<volatile LowLatencyState*>(ll.state);
  if (!job.sends) {
    bool has_failed = __syncthreads_or(now.has_failed);
    if constexpr (R::kEnabled) {
      const unsigned int passed =
          pass_tokens_on(ctx, rails, ll, batch, state->tokens_put, now.number, has_failed);
      if (passed == 0) return;
      has_failed = passed >= kSentFailed;
    }
    receive<R>(ctx, ll, job, now.number, has_failed);
    return;
  }
  // The last CTA counts it up when all CTAs have read it.
  const std::uint64_t tokens_put =
      R::kEnabled ? *static_cast<volatile std::uint64_t*>(&ctx.state->rail_signals[kTokensPut]) + 1
                  : 0;
  const Destinations found = find_destinations<R>(ctx, job, window.top_k);
  rows.set(found.ranks, job.num_tokens, ctx.control.local_ranks());
  if constexpr (R::kEnabled) {
    domains.set(found.domains, job.num_tokens, ctx.control.num_domains);
  }
  bool has_failed = __syncthreads_or(now.has_failed);
  const int thread = threadIdx.x;
  if (blockIdx.x == 0 && thread < job.num_tokens) {
    ll.state->ranks_of[thread] = found.ranks;
    ll.state->domains_of[thread] = found.domains;
  }
  const int locals = ctx.control.local_ranks();
  if (thread < locals) counts[thread] = rows.count(thread, job.num_tokens);
  const bool is_good = has_failed || send_rows<R>(ctx, ll, job, rows, domains);
  const unsigned int sent = count_sent(&ll.state->sent, !is_good, has_failed);
  if (sent == 0 && !(R::kEnabled && job.completes)) return;
  const std::uint32_t bad = sent >= kSentBad ? kBadRouting : 0;
  if (thread == 0 && sent != 0 && sent < kSentFailed) {
    fence_system();  // passes on what this thread saw through the other CTAs' fences
    for (int local_rank = 0; local_rank < locals; ++local_rank) {
      post_numbered(sent_word(ll, rank_at(ctx, local_rank), Turn::kDispatch, ctx.rank), now.number,
                    counts[local_rank] | bad);
    }
    ll.state->dispatches = now.number;
  }
  if constexpr (R::kEnabled) {
    if (sent != 0 && sent < kSentFailed) {
      see_other_ctas();
      has_failed = !__syncthreads_and(
          put_messages(ctx, rails, ll, domains, job.num_tokens, bad, now.number));
      if (thread == 0) ctx.state->rail_signals[kTokensPut] = ll.state->tokens_put = tokens_put;
    }
    if (!job.completes) return;
    const unsigned int passed =
        pass_tokens_on(ctx, rails, ll, batch, tokens_put, now.number, has_failed);
    if (passed != 0) receive<R>(ctx, ll, job, now.number, passed >= kSentFailed);
  } else if (job.completes) {
    receive<R>(ctx, ll, job, now.number, sent >= kSentFailed);
  }
}

template <typename R>
void launch_dispatch(const KernelContext& ctx, const LowLatencyContext& ll,
                     const LowLatencyDispatch& job, int num_ctas, std::uintptr_t stream,
                     const R& rails) {
  const auto kernel = ll_dispatch_kernel<R>;
  kernel<<<num_ctas, kLlThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(ctx, ll, job, rails);
  cuda_check(cudaGetLastError(), "launching a low-latency dispatch");
}

}  // namespace

void low_latency_dispatch(const KernelContext& ctx, const LowLatencyContext& ll,
                          const LowLatencyDispatch& job, int num_ctas, std::uintptr_t stream,
                          const Rails* rails) {
  if (!job.sends && rails == nullptr) num_ctas = 1;
  with_rails(rails, [&](const auto& way) { launch_dispatch(ctx, ll, job, num_ctas, stream, way); });
}

}  // namespace ncclep::native
