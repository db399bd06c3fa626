// Low-latency combine: the experts' outputs for each row return to its source rank, which sums them
// (protocol.h).
//
// A rank sums the outputs for each row in fp32, in the given order, and sends the sum, rounded
// once; the source rank adds the ranks' sums in fp32, in ascending order of ranks, its own
// unrounded, and rounds once: the contract's order.  With one output per row there is nothing to
// add at the experts' rank, and rows are sent unchanged.
#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/device/vector.cuh"
#include "native/device/warp.cuh"
#include "native/low_latency/operation.cuh"
#include "native/low_latency/rail_tokens.cuh"

namespace ncclep::native {

namespace {

// Rows, or sums, that are loaded together.
constexpr int kAtOnce = 4;

// A Part in fp32.
template <typename T>
struct Sum {
  static constexpr int kWidth = Vector<T>::kWidth;
  float numbers[kLlVectors][kWidth] = {};

  __device__ void add(const Part& part) {
#pragma unroll
    for (int v = 0; v < kLlVectors; ++v) Vector<T>::add(numbers[v], part.vectors[v]);
  }
  __device__ void add(const Sum& other) {
#pragma unroll
    for (int v = 0; v < kLlVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) numbers[v][i] += other.numbers[v][i];
    }
  }
  __device__ Part round() const {
    Part part;
#pragma unroll
    for (int v = 0; v < kLlVectors; ++v) part.vectors[v] = Vector<T>::round(numbers[v]);
    return part;
  }
};

// Adds the outputs for a row, of which there may be several.  Called by one warp.
template <typename T>
__device__ void add_rows(const LowLatencyWindow& window, const LowLatencyCombine& job,
                         std::size_t row, int offset, Sum<T>& sum) {
  const int lane = threadIdx.x % 32;
  const int mine = lane < window.top_k ? job.rows_of[row * window.top_k + lane] : -1;
  std::uint32_t left = __ballot_sync(~0u, mine >= 0 && mine < job.num_rows);
  while (left != 0) {
    Part parts[kAtOnce] = {};
    int num = 0;
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      if (left == 0) break;
      const std::size_t from = __shfl_sync(~0u, mine, __ffs(left) - 1);
      parts[p].load(job.y + from * window.sum_bytes, offset, window.sum_bytes);
      left &= left - 1;
      num = p + 1;
    }
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      if (p < num) sum.add(parts[p]);
    }
  }
}

// Where this rank's sum for a row of `rank` belongs: in its window or that of its rail peer here.
template <typename R>
__device__ char* sum_at(const KernelContext& ctx, const LowLatencyContext& ll, int rank,
                        int index) {
  const LowLatencyWindow& window = ll.window;
  if constexpr (R::kEnabled) {
    if (!is_local(ctx, rank)) {
      return ll.window_of[host_of(ctx, rank)] +
             window.rank_sums(ctx.control.domain_of(rank), ctx.control.local_rank_of(ctx.rank)) +
             static_cast<std::size_t>(index) * window.sum_bytes;
    }
  }
  return ll.window_of[rank] + window.sums() + row_at(window, ctx.rank, index) * window.sum_bytes;
}

// The rows that return to other ranks, rank by rank from the next one on, so that the ranks do not
// all send to the same one first.
template <typename R>
class ReturningRows {
 public:
  // `up_to` is in shared memory.  Called by all threads; a barrier must follow.
  __device__ ReturningRows(const KernelContext& ctx, const LowLatencyContext& ll, int* up_to)
      : first_(ctx.rank + 1), num_ranks_(ll.window.num_ranks), up_to_(up_to) {
    for (int number = threadIdx.x; number < kGroups * 32; number += kLlThreads) {
      int count = 0;
      // This rank adds up what it has for its rail peers' tokens itself.
      if (number < num_ranks_ - 1 && (!R::kEnabled || host_of(ctx, rank(number)) != ctx.rank)) {
        const std::uint64_t word = *sent_word(ll, ctx.rank, Turn::kDispatch, rank(number));
        count = static_cast<int>(word & (kBadRouting - 1));
      }
      up_to_[number] = warp_scan(count);
    }
  }

  // After the barrier; called by whole warps, as is `find`.
  __device__ int count() {
    if (kGroups == 1) return up_to_[31];
    const int lane = threadIdx.x % 32;
    groups_up_to_ = warp_scan(lane < kGroups ? up_to_[lane * 32 + 31] : 0);
    return __shfl_sync(~0u, groups_up_to_, 31);
  }

  // The rank that the row with this index returns to; turns the index into the one there.
  __device__ int find(int& row) const {
    const int group = kGroups == 1 ? 0 : before(groups_up_to_, row);
    return rank(group * 32 + before(up_to_[group * 32 + threadIdx.x % 32], row));
  }

 private:
  static constexpr int kGroups = (R::kEnabled ? kMaxRanks : kWarpSize) / 32;
  static_assert(kGroups <= 32 && kMaxRanks % 32 == 0);

  __device__ int rank(int number) const {
    const int rank = first_ + number;
    return rank < num_ranks_ ? rank : rank - num_ranks_;
  }
  // How many lanes' rows all come before this one, which is then counted from theirs on.
  __device__ static int before(int up_to, int& row) {
    const int lanes = __popc(__ballot_sync(~0u, up_to <= row));
    const int rows = __shfl_sync(~0u, up_to, lanes == 0 ? 0 : lanes - 1);
    row -= lanes == 0 ? 0 : rows;
    return lanes;
  }

  const int first_, num_ranks_;
  int* const up_to_;      // of each group of 32 ranks, the rows of those up to each
  int groups_up_to_ = 0;  // the rows of the groups up to that with this lane's number
};

// Sends this CTA's share of the rows for other ranks.
template <typename T, typename R>
__device__ void send_back(const KernelContext& ctx, const LowLatencyContext& ll,
                          const LowLatencyCombine& job, ReturningRows<R>& returning) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pieces = (window.sum_bytes + kLlPiece - 1) / kLlPiece;
  const int items = returning.count() * pieces;
  for (int i = warp * gridDim.x + blockIdx.x; i < items; i += gridDim.x * kLlWarps) {
    int index = i / pieces;
    const int rank = returning.find(index);
    const int offset = i % pieces * kLlPiece + lane * 16;
    const std::size_t row = row_at(window, rank, index);
    Part part;
    if (job.rows_of == nullptr) {
      part.load(job.y + row * window.sum_bytes, offset, window.sum_bytes);
    } else {
      Sum<T> sum;
      add_rows(window, job, row, offset, sum);
      part = sum.round();
    }
    part.store(sum_at<R>(ctx, ll, rank, index), offset, window.sum_bytes);
  }
}

// Adds up this domain's sums for the tokens of the rail peers, and puts them.  Called by all
// threads of all CTAs when all ranks of this domain have sent; false when the group has failed.
template <typename T, typename R>
__device__ bool put_token_sums(const KernelContext& ctx, const R& rails,
                               const LowLatencyContext& ll, const LowLatencyCombine& job,
                               TokenBatch& batch, std::uint64_t goal, std::uint64_t number,
                               bool has_failed) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int locals = ctx.control.local_ranks(), own = ctx.control.domain_of(ctx.rank);
  char* const start = ll.window_of[ctx.rank];
  for (std::uint64_t domains = has_failed ? 0 : other_domains(ctx); domains != 0;) {
    domains = batch.take(ctx, ll, domains, window.sum_bytes);
    for (int i = warp; i < batch.num_mine(); i += kLlWarps) {
      const auto [token, piece] = batch.find_mine(i);
      const int offset = piece * kLlPiece + lane * 16;
      const int domain = batch.domain_of[token];
      const int own_index = lane < locals ? batch.row_index(lane, token) : 0;
      Sum<T> sum;
      for (std::uint32_t left = batch.rows.ranks_of[token]; left != 0; left &= left - 1) {
        const int rank = __ffs(left) - 1, index = __shfl_sync(~0u, own_index, rank);
        const std::size_t row = row_at(window, rail_peer_in(ctx, domain), index);
        if (rank == ctx.control.local_rank_of(ctx.rank) && job.rows_of != nullptr) {
          Sum<T> mine;
          add_rows(window, job, row, offset, mine);
          sum.add(mine);
          continue;
        }
        Part part = {};
        const char* from = rank == ctx.control.local_rank_of(ctx.rank)
                               ? job.y + row * window.sum_bytes
                               : start + window.rank_sums(domain, rank) +
                                     static_cast<std::size_t>(index) * window.sum_bytes;
        part.load(from, offset, window.sum_bytes);
        sum.add(part);
      }
      char* to = start + window.sent_sums(domain) +
                 std::size_t{1} * batch.index_of(token) * window.sum_bytes;
      sum.round().store(to, offset, window.sum_bytes);
    }
  }
  const unsigned int passed = count_sent(&ll.state->passed, false, has_failed);
  if (passed != 0 && passed < kSentFailed) {
    see_other_ctas();
    const int domain = threadIdx.x;
    bool is_put = true;
    if (has_rail_peer(ctx, domain)) {
      const Message message(ctx, ll, domain);
      is_put = put(ctx, rails, Phase::kLowLatencyCombine, number, kLowLatencyWindow, domain,
                   window.domain_sums(own), window.sent_sums(domain),
                   std::size_t{1} * message.num_tokens * window.sum_bytes, kTokenSumsPut);
    }
    has_failed = !__syncthreads_and(is_put);
    if (threadIdx.x == 0) ctx.state->rail_signals[kTokenSumsPut] = goal;
  }
  return !has_failed &&
         wait_for_rail_peers(ctx, rails, Phase::kLowLatencyCombine, kTokenSumsPut, goal, number);
}

// The source rank's sum for a token, one piece of the row per warp.
template <typename T, typename R>
class SourceSums {
 public:
  __device__ SourceSums(const KernelContext& ctx, const LowLatencyContext& ll,
                        const LowLatencyCombine& job, const RowsToRanks& rows,
                        const RowsToDomains& domains)
      : ctx_(ctx), ll_(ll), job_(job), rows_(rows), domains_(domains) {}

  // The part that does not depend on other ranks.  Items number the pieces of all tokens, token by
  // token.
  __device__ void begin(int item) {
    const LowLatencyWindow& window = ll_.window;
    const int lane = threadIdx.x % 32;
    const int pieces = (window.sum_bytes + kLlPiece - 1) / kLlPiece;
    token_ = item / pieces;
    offset_ = item % pieces * kLlPiece + lane * 16;
    ranks_ = rows_.ranks_of[token_];
    index_ = lane < ctx_.control.local_ranks() ? rows_.index(lane, token_) : 0;
    own_ = {};
    const int own = local_rank(ctx_, ctx_.rank);
    if ((ranks_ >> own & 1) == 0) return;
    const std::size_t row = row_at(window, ctx_.rank, __shfl_sync(~0u, index_, own));
    if (job_.rows_of == nullptr) {
      Part part = {};
      part.load(job_.y + row * window.sum_bytes, offset_, window.sum_bytes);
      own_.add(part);
    } else {
      add_rows(window, job_, row, offset_, own_);
    }
  }

  // The rest; writes NaN unless the parts of all ranks are here.
  __device__ void finish(bool arrived) {
    const LowLatencyWindow& window = ll_.window;
    char* out = job_.out + static_cast<std::size_t>(token_) * window.sum_bytes;
    if (!arrived) {
      const uint4 nan = make_uint4(~0u, ~0u, ~0u, ~0u);
      Part part;
#pragma unroll
      for (int v = 0; v < kLlVectors; ++v) part.vectors[v] = nan;
      part.store(out, offset_, window.sum_bytes);
      return;
    }
    const char* sums = ll_.window_of[ctx_.rank] + window.sums();
    Sum<T> total;
    const int own = local_rank(ctx_, ctx_.rank);
    bool has_own = ranks_ >> own & 1;
    for (std::uint32_t left = ranks_ & ~(1u << own); left != 0;) {
      Part parts[kAtOnce] = {};
      int of_rank[kAtOnce], num = 0;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (left == 0) break;
        of_rank[p] = __ffs(left) - 1;
        left &= left - 1;
        const std::size_t row =
            row_at(window, rank_at(ctx_, of_rank[p]), __shfl_sync(~0u, index_, of_rank[p]));
        parts[p].load(sums + row * window.sum_bytes, offset_, window.sum_bytes);
        num = p + 1;
      }
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (p >= num) continue;
        if (has_own && of_rank[p] > own) {
          total.add(own_);
          has_own = false;
        }
        total.add(parts[p]);
      }
    }
    if (has_own) total.add(own_);
    if constexpr (R::kEnabled) total = over_domains(total.round());
    total.round().store(out, offset_, window.sum_bytes);
  }

 private:
  // The sum over all domains, of which `own` is this one's.
  __device__ Sum<T> over_domains(const Part& own) const {
    const LowLatencyWindow& window = ll_.window;
    Sum<T> total;
    for (int domain = 0; domain < ctx_.control.num_domains; ++domain) {
      if (domain == ctx_.control.domain_of(ctx_.rank)) {
        total.add(own);
      } else if (domains_.ranks_of[token_] >> domain & 1) {
        Part part = {};
        part.load(ll_.window_of[ctx_.rank] + window.domain_sums(domain) +
                      std::size_t{1} * domains_.index(domain, token_) * window.sum_bytes,
                  offset_, window.sum_bytes);
        total.add(part);
      }
    }
    return total;
  }

  const KernelContext& ctx_;
  const LowLatencyContext& ll_;
  const LowLatencyCombine& job_;
  const RowsToRanks& rows_;
  const RowsToDomains& domains_;
  int token_ = 0, offset_ = 0, index_ = 0;
  std::uint32_t ranks_ = 0;
  Sum<T> own_;
};

template <typename T, typename R>
__global__ void __launch_bounds__(kLlThreads, 1)
    ll_combine_kernel(KernelContext ctx, LowLatencyContext ll, LowLatencyCombine job,
                      const __grid_constant__ R rails) {
  __shared__ RowsToRanks rows;
  __shared__ RowsToDomains domains;
  __shared__ TokenBatch batch;
  __shared__ int returning_up_to[kMaxRanks];
  const LowLatencyWindow& window = ll.window;
  const Operation now = begin(ctx, ll, Turn::kCombine, job.sends);
  const int thread = threadIdx.x;
  const bool has_token = thread < job.num_tokens;
  // The last CTA counts it up when all CTAs have read it.
  const std::uint64_t sums_put =
      R::kEnabled
          ? *static_cast<volatile std::uint64_t*>(&ctx.state->rail_signals[kTokenSumsPut]) + 1
          : 0;
  ReturningRows<R> returning(ctx, ll, returning_up_to);
  const int locals = ctx.control.local_ranks();
  rows.set(has_token ? ll.state->ranks_of[thread] : 0, job.num_tokens, locals);
  if constexpr (R::kEnabled) {
    domains.set(has_token ? ll.state->domains_of[thread] : 0, job.num_tokens,
                ctx.control.num_domains);
  }
  bool has_failed = __syncthreads_or(now.has_failed);
  if (job.sends) {
    if (!has_failed) send_back<T, R>(ctx, ll, job, returning);
    const unsigned int sent = count_sent(&ll.state->sent, false, has_failed);
    if (thread == 0 && sent != 0 && sent < kSentFailed) {
      fence_system();  // passes on what this thread saw through the other CTAs' fences
      for (int local_rank = 0; local_rank < locals; ++local_rank) {
        post_numbered(sent_word(ll, rank_at(ctx, local_rank), Turn::kCombine, ctx.rank), now.number,
                      0);
      }
      ll.state->combines = now.number;
    }
    if (!job.completes) return;
  }
  const int pieces = (window.sum_bytes + kLlPiece - 1) / kLlPiece;
  const int items = job.num_tokens * pieces, step = gridDim.x * kLlWarps;
  int item = thread / 32 * gridDim.x + blockIdx.x;
  SourceSums<T, R> sums(ctx, ll, job, rows, domains);
  if (item < items) sums.begin(item);
  // Every CTA waits for every rank of this domain, whether or not it has a part for this one: no
  // rank may leave before all have sent (protocol.h).
  if (thread < locals && !has_failed) {
    const int rank = rank_at(ctx, thread);
    has_failed = wait_for_numbered<load_acquire>(ctx, Phase::kLowLatencyCombine, rank, now.number,
                                                 sent_word(ll, ctx.rank, Turn::kCombine, rank),
                                                 now.number) < 0;
  }
  has_failed = __syncthreads_or(has_failed);
  if constexpr (R::kEnabled) {
    has_failed = !put_token_sums<T>(ctx, rails, ll, job, batch, sums_put, now.number, has_failed);
  }
  while (item < items) {
    sums.finish(!has_failed);
    item += step;
    if (item < items) sums.begin(item);
  }
}

template <typename T, typename R>
void launch_combine(const KernelContext& ctx, const LowLatencyContext& ll,
                    const LowLatencyCombine& job, int num_ctas, std::uintptr_t stream,
                    const R& rails) {
  const auto kernel = ll_combine_kernel<T, R>;
  kernel<<<num_ctas, kLlThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(ctx, ll, job, rails);
  cuda_check(cudaGetLastError(), "launching a low-latency combine");
}

}  // namespace

void low_latency_combine(const KernelContext& ctx, const LowLatencyContext& ll,
                         const LowLatencyCombine& job, int num_ctas, std::uintptr_t stream,
                         const Rails* rails) {
  with_rails(rails, [&](const auto& way) {
    if (job.dtype == ncclepBfloat16) {
      launch_combine<__nv_bfloat16>(ctx, ll, job, num_ctas, stream, way);
    } else if (job.dtype == ncclepFloat16) {
      launch_combine<__half>(ctx, ll, job, num_ctas, stream, way);
    } else {
      launch_combine<float>(ctx, ll, job, num_ctas, stream, way);
    }
  });
}

}  // namespace ncclep::native
