// Low-latency combine: the experts' outputs for each row return to its source rank, which sums them
// (protocol.h).
//
// A rank sums its rows for each place in fp32, in the given order, and sends the sum, rounded once;
// the source rank adds the ranks' sums in fp32, in ascending order of ranks, its own unrounded, and
// rounds once: the contract's order.  With one row per place there is nothing to add at the
// experts' rank, and rows are sent unchanged.
#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/device/vector.cuh"
#include "native/low_latency/operation.cuh"

namespace ncclep::native {

namespace {

// Rows, or sums, that are loaded together.
constexpr int kAtOnce = 4;

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

// The same in fp32.
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

// Adds the rows of a place, of which there may be several.  Called by one warp.
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

// Sends this CTA's share of the rows for other ranks; `counts`: how many rows each of them has
// here.
template <typename T>
__device__ void send_back(const KernelContext& me, const LowLatencyContext& ll,
                          const LowLatencyCombine& job, const int* counts) {
  const LowLatencyWindow& window = ll.window;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_ranks = window.num_ranks;
  const int pieces = (window.sum_bytes + kLlPiece - 1) / kLlPiece;
  int total = 0;
  for (int rank = 0; rank < num_ranks; ++rank) total += rank == me.rank ? 0 : counts[rank];
  for (int i = warp * gridDim.x + blockIdx.x; i < total * pieces; i += gridDim.x * kLlWarps) {
    // Starts with the next rank, so that the ranks do not all send to the same one first.
    int place = i / pieces, rank = (me.rank + 1) % num_ranks;
    while (place >= counts[rank]) {
      place -= counts[rank];
      rank = (rank + 1) % num_ranks;
    }
    const int offset = i % pieces * kLlPiece + lane * 16;
    const std::size_t row = row_at(window, rank, place);
    Part part;
    if (job.rows_of == nullptr) {
      part.load(job.y + row * window.sum_bytes, offset, window.sum_bytes);
    } else {
      Sum<T> sum;
      add_rows(window, job, row, offset, sum);
      part = sum.round();
    }
    char* to =
        ll.window_of[rank] + window.sums() + row_at(window, me.rank, place) * window.sum_bytes;
    part.store(to, offset, window.sum_bytes);
  }
}

// The source rank's sum for a token, one piece of the row per warp.
template <typename T>
class SourceSums {
 public:
  __device__ SourceSums(const KernelContext& me, const LowLatencyContext& ll,
                        const LowLatencyCombine& job, const Places& places)
      : me_(me), ll_(ll), job_(job), places_(places) {}

  // The part that does not depend on other ranks.  Items number the pieces of all tokens, token by
  // token.
  __device__ void begin(int item) {
    const LowLatencyWindow& window = ll_.window;
    const int lane = threadIdx.x % 32;
    const int pieces = (window.sum_bytes + kLlPiece - 1) / kLlPiece;
    token_ = item / pieces;
    offset_ = item % pieces * kLlPiece + lane * 16;
    ranks_ = places_.ranks_of[token_];
    place_ = lane < window.num_ranks ? places_.place(lane, token_) : 0;
    own_ = {};
    if ((ranks_ >> me_.rank & 1) == 0) return;
    const std::size_t row = row_at(window, me_.rank, __shfl_sync(~0u, place_, me_.rank));
    if (job_.rows_of == nullptr) {
      Part part = {};
      part.load(job_.y + row * window.sum_bytes, offset_, window.sum_bytes);
      own_.add(part);
    } else {
      add_rows(window, job_, row, offset_, own_);
    }
  }

  // The rest; writes NaN unless the parts of all ranks are here.
  __device__ void finish(bool is_here) {
    const LowLatencyWindow& window = ll_.window;
    char* out = job_.out + static_cast<std::size_t>(token_) * window.sum_bytes;
    if (!is_here) {
      const uint4 nan = make_uint4(~0u, ~0u, ~0u, ~0u);
      Part part;
#pragma unroll
      for (int v = 0; v < kLlVectors; ++v) part.vectors[v] = nan;
      part.store(out, offset_, window.sum_bytes);
      return;
    }
    const char* sums = ll_.window_of[me_.rank] + window.sums();
    Sum<T> total;
    bool has_own = ranks_ >> me_.rank & 1;
    for (std::uint32_t left = ranks_ & ~(1u << me_.rank); left != 0;) {
      Part parts[kAtOnce] = {};
      int of_rank[kAtOnce], num = 0;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (left == 0) break;
        of_rank[p] = __ffs(left) - 1;
        left &= left - 1;
        const std::size_t row = row_at(window, of_rank[p], __shfl_sync(~0u, place_, of_rank[p]));
        parts[p].load(sums + row * window.sum_bytes, offset_, window.sum_bytes);
        num = p + 1;
      }
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (p >= num) continue;
        if (has_own && of_rank[p] > me_.rank) {
          total.add(own_);
          has_own = false;
        }
        total.add(parts[p]);
      }
    }
    if (has_own) total.add(own_);
    total.round().store(out, offset_, window.sum_bytes);
  }

 private:
  const KernelContext& me_;
  const LowLatencyContext& ll_;
  const LowLatencyCombine& job_;
  const Places& places_;
  int token_ = 0, offset_ = 0, place_ = 0;
  std::uint32_t ranks_ = 0;
  Sum<T> own_;
};

template <typename T>
__global__ void __launch_bounds__(kLlThreads, 1)
    ll_combine_kernel(KernelContext me, LowLatencyContext ll, LowLatencyCombine job) {
  __shared__ Places places;
  __shared__ int counts[kMaxRanks];
  const LowLatencyWindow& window = ll.window;
  const Operation now = begin(me, ll, Turn::kCombine, job.sends);
  const int thread = threadIdx.x;
  const std::uint32_t ranks = thread < job.num_tokens ? ll.state->ranks_of[thread] : 0;
  if (thread < window.num_ranks) {
    const std::uint64_t word = *sent_word(ll, me.rank, Turn::kDispatch, thread);
    counts[thread] = static_cast<int>(word & (kBadRouting - 1));
  }
  places.set(ranks, job.num_tokens, window.num_ranks);
  bool has_failed = __syncthreads_or(now.has_failed);
  if (job.sends) {
    if (!has_failed) send_back<T>(me, ll, job, counts);
    const unsigned int sent = count_sent(ll.state, false, has_failed);
    if (thread == 0 && sent != 0 && sent < kSentFailed) {
      fence_system();  // passes on what this thread saw through the other CTAs' fences
      for (int rank = 0; rank < window.num_ranks; ++rank) {
        post_numbered(sent_word(ll, rank, Turn::kCombine, me.rank), now.number, 0);
      }
      ll.state->combines = now.number;
    }
    if (!job.completes) return;
  }
  const int pieces = (window.sum_bytes + kLlPiece - 1) / kLlPiece;
  const int items = job.num_tokens * pieces, step = gridDim.x * kLlWarps;
  int item = thread / 32 * gridDim.x + blockIdx.x;
  SourceSums<T> sums(me, ll, job, places);
  if (item < items) sums.begin(item);
  // Every CTA waits for every rank, whether or not it has a part for this one: no rank may leave
  // before all have sent (protocol.h).
  if (thread < window.num_ranks && !has_failed) {
    has_failed = wait_for_numbered<load_acquire>(me, Phase::kLowLatencyCombine, thread,
                                                 sent_word(ll, me.rank, Turn::kCombine, thread),
                                                 now.number) < 0;
  }
  has_failed = __syncthreads_or(has_failed);
  while (item < items) {
    sums.finish(!has_failed);
    item += step;
    if (item < items) sums.begin(item);
  }
}

}  // namespace

void low_latency_combine(const KernelContext& me, const LowLatencyContext& ll,
                         const LowLatencyCombine& job, int num_ctas, std::uintptr_t stream) {
  const auto kernel = job.dtype == DType::kBFloat16  ? ll_combine_kernel<__nv_bfloat16>
                      : job.dtype == DType::kFloat16 ? ll_combine_kernel<__half>
                                                     : ll_combine_kernel<float>;
  kernel<<<num_ctas, kLlThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(me, ll, job);
  cuda_check(cudaGetLastError(), "launching a low-latency combine");
}

}  // namespace ncclep::native
