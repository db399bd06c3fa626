// Shared by low-latency dispatch and combine.
#pragma once

#include <cuda_runtime.h>

#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/low_latency/protocol.h"

namespace ncclep::native {

constexpr int kLlThreads = 512, kLlWarps = kLlThreads / 32;
// A warp moves pieces of kLlVectors 16-byte vectors per lane.
constexpr int kLlVectors = 2, kLlStride = 32 * 16, kLlPiece = kLlVectors * kLlStride;

static_assert(kLlThreads >= kLowLatencyTokens, "a thread for each token");
static_assert(kLlThreads >= kMaxDomains, "a thread for each domain");
static_assert(kMaxDomains == 64, "a lane, and a bit, for each; and for 32 ranks of a domain");

// One lane's vectors of a piece of a row.
struct Part {
  uint4 vectors[kLlVectors];

  __device__ void load(const char* row, int offset, int num_bytes) {
#pragma unroll
    for (int v = 0; v < kLlVectors; ++v) {
      const int at = offset + v * kLlStride;
      if (at < num_bytes) vectors[v] = __ldcg(reinterpret_cast<const uint4*>(row + at));
    }
  }
  __device__ void store(char* row, int offset, int num_bytes) const {
#pragma unroll
    for (int v = 0; v < kLlVectors; ++v) {
      const int at = offset + v * kLlStride;
      if (at < num_bytes) *reinterpret_cast<uint4*>(row + at) = vectors[v];
    }
  }
};

enum class Turn : int { kDispatch, kCombine };

// The word in which `from` tells rank `to` that it has sent.
__device__ inline std::uint64_t* sent_word(const LowLatencyContext& ll, int to, Turn turn,
                                           int from) {
  return reinterpret_cast<std::uint64_t*>(ll.window_of[to] + ll.window.sent()) +
         static_cast<int>(turn) * ll.window.num_ranks + from;
}

// This kernel's operation; the same in every CTA until all have counted themselves.
struct Operation {
  std::uint64_t number;
  bool has_failed;  // the group had failed before this kernel
};

// Called by all threads.  Not a barrier: only thread 0 learns of a failure.
__device__ inline Operation begin(const KernelContext& ctx, const LowLatencyContext& ll, Turn turn,
                                  bool sends) {
  const auto* state = static_cast<volatile LowLatencyState*>(ll.state);
  const std::uint64_t dispatches = state->dispatches, combines = state->combines;
  Operation now{(turn == Turn::kDispatch ? dispatches : combines) + sends, false};
  if (threadIdx.x != 0) return now;
  now.has_failed = has_failed(ctx);
  const bool is_in_turn = dispatches == combines + (turn == Turn::kCombine);
  if (sends && !is_in_turn && !now.has_failed) {
    // For example, a graph that holds only a dispatch is replayed twice: others may still be
    // reading.
    const Phase phase =
        turn == Turn::kDispatch ? Phase::kLowLatencyDispatch : Phase::kLowLatencyCombine;
    report_failure(ctx, Reason::kOutOfTurn, phase, ctx.rank, now.number);
    now.has_failed = true;
  }
  return now;
}

// The window of a low-latency object's rails.
constexpr RailWindow kLowLatencyWindow = kControlWindow;

// The ranks of this domain, or the other domains, that this rank's tokens go to, one bit each in a
// `Bits`, and the indices of their rows there: the number of earlier tokens that go to the same
// rank or domain.  Domains count as ranks here.
template <typename Bits>
struct RowsTo {
  Bits ranks_of[kLowLatencyTokens];
  std::uint32_t tokens_of[8 * sizeof(Bits)][kLlWarps];  // a bit for each

  // `ranks`: of the token with this thread's index.  A barrier must follow.
  __device__ void set(Bits ranks, int num_tokens, int num_ranks) {
    const int token = threadIdx.x, warp = threadIdx.x / 32;
    if (token < num_tokens) ranks_of[token] = ranks;
    if (warp * 32 >= num_tokens) return;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::uint32_t tokens = __ballot_sync(~0u, ranks >> rank & 1);
      if (threadIdx.x % 32 == 0) tokens_of[rank][warp] = tokens;
    }
  }

  __device__ int index(int rank, int token) const {
    int sum = 0;
    for (int word = 0; word < token / 32; ++word) sum += __popc(tokens_of[rank][word]);
    return sum + __popc(tokens_of[rank][token / 32] & ((1u << token % 32) - 1));
  }

  __device__ int count(int rank, int num_tokens) const {
    int sum = 0;
    for (int word = 0; word * 32 < num_tokens; ++word) sum += __popc(tokens_of[rank][word]);
    return sum;
  }
};

using RowsToRanks = RowsTo<std::uint32_t>;
using RowsToDomains = RowsTo<std::uint64_t>;

// A row in [R, max_tokens], by its index among those of `rank`.
__device__ inline std::size_t row_at(const LowLatencyWindow& window, int rank, int index) {
  return static_cast<std::size_t>(rank) * window.max_tokens + index;
}

// Writes a row's experts on its rank, numbered as that rank numbers its own, and their weights into
// the window `to`.  Called by one warp, whose lane k has the k-th assignment: `expert` of `rank` or
// of another, numbered alike; -1: none.
__device__ inline void store_assignments(const LowLatencyWindow& window, char* to, std::size_t row,
                                         int rank, int num_local, int expert, float weight) {
  const int lane = threadIdx.x % 32;
  if (lane >= window.top_k) return;
  const bool is_its = expert >= 0 && expert / num_local == rank;
  const std::size_t assignment = row * window.top_k + lane;
  reinterpret_cast<std::int32_t*>(to + window.experts())[assignment] =
      is_its ? expert % num_local : -1;
  reinterpret_cast<float*>(to + window.weights())[assignment] = is_its ? weight : 0;
}

// Fields of `LowLatencyState::sent`: CTAs that have sent, those with a bad routing, and those that
// found the group failed.
constexpr unsigned int kSentCta = 1, kSentBad = 1 << 10, kSentFailed = 1 << 20;

// Adds to a word of the object's state; returns the sum to who completes `all` of a kind, and 0 to
// the others.
__device__ inline unsigned int count_in(unsigned int* word, unsigned int mine, unsigned int all) {
  __threadfence();
  const unsigned int sum = atomicAdd(word, mine) + mine;
  if (sum % kSentBad != all) return 0;
  *word = 0;
  return sum;
}

// All threads call it after issuing what they send, with a word of the object's state.  Returns the
// sum in the last CTA, where the writes of all CTAs come before what its thread 0 stores after a
// system fence; 0 in the others.
__device__ inline unsigned int count_sent(unsigned int* word, bool is_bad, bool has_failed) {
  __shared__ unsigned int sum;
  is_bad = __syncthreads_or(is_bad);
  if (threadIdx.x == 0) {
    sum = count_in(word, kSentCta + is_bad * kSentBad + has_failed * kSentFailed, gridDim.x);
  }
  __syncthreads();
  return sum;
}

}  // namespace ncclep::native
