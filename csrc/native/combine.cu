// One kernel, two kinds of warps in every CTA.
//
// *Pushing* warps add up, in fp32 and in ascending order of local experts, the rows of each pair
// that came from another rank, and store the sum, rounded once, into that rank's window; when the
// pairs of a chunk of its tokens are done they tell it so.  *Summing* warps wait for the chunks of
// this rank's own tokens and add the ranks' parts up in ascending order, this rank's own part
// straight from its rows, unrounded.
//
// The window for sums has a row for each (token, rank).  Nobody pushes into a rank's window before
// that rank has entered this combine, and so has left the one before.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/cuda.h"
#include "native/combine.h"
#include "native/wait.cuh"

namespace ncclep::native {

namespace {

constexpr int kWarpSize = 32;
constexpr int kPushingWarps = 12;
constexpr int kSummingWarps = 4;
constexpr int kPushingThreads = kPushingWarps * kWarpSize;
constexpr int kThreads = (kPushingWarps + kSummingWarps) * kWarpSize;
constexpr int kPushingBarrier = 1;

// 16 bytes of a row as fp32 numbers.
template <typename T>
struct Vector;

template <>
struct Vector<float> {
  static constexpr int kWidth = 4;
  __device__ static void add(float* sum, uint4 bits) {
    sum[0] += __uint_as_float(bits.x);
    sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z);
    sum[3] += __uint_as_float(bits.w);
  }
  __device__ static uint4 round(const float* sum) {
    return make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                      __float_as_uint(sum[3]));
  }
};

template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kWidth = 8;
  __device__ static void add(float* sum, uint4 bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a bf16 is the upper half of an fp32
      sum[2 * i] += __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 round(const float* sum) {
    uint4 bits;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    return bits;
  }
};

template <>
struct Vector<__half> {
  static constexpr int kWidth = 8;
  __device__ static void add(float* sum, uint4 bits) {
    const auto* pairs = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = __half22float2(pairs[i]);
      sum[2 * i] += both.x;
      sum[2 * i + 1] += both.y;
    }
  }
  __device__ static uint4 round(const float* sum) {
    uint4 bits;
    auto* pairs = reinterpret_cast<__half2*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    return bits;
  }
};

template <typename T>
__device__ void clear(float* sum) {
#pragma unroll
  for (int i = 0; i < Vector<T>::kWidth; ++i) sum[i] = 0;
}

__device__ char* sums_window(const Rank& me, int rank) {
  return me.rows_of[rank] + 2 * me.dispatch_bytes;
}

// Adds vector `i` of the rows of picks `first` to `end` - 1 to `sum`, in this order.
template <typename T>
__device__ void add_rows(float* sum, const Combine& job, int first, int end, int i) {
  for (int pick = first; pick < end; ++pick) {
    const char* row = job.y + static_cast<std::size_t>(job.routes.pick_slot[pick]) * job.row_bytes;
    Vector<T>::add(sum, __ldg(reinterpret_cast<const uint4*>(row) + i));
  }
}

// True for all pushing threads of the CTA if it is for all of them.
__device__ bool all_pushing_threads(bool mine) {
  int all;
  asm volatile(
      "{ .reg .pred in, out; setp.ne.s32 in, %1, 0; bar.red.and.pred out, %2, %3, in; "
      "selp.s32 %0, 1, 0, out; }"
      : "=r"(all)
      : "r"(static_cast<int>(mine)), "n"(kPushingBarrier), "n"(kPushingThreads)
      : "memory");
  return all != 0;
}

// One CTA's share of the (source, chunk)s: their pairs' sums and picks' values to their home.
template <typename T>
__device__ void push(const Rank& me, const Combine& job, std::uint64_t epoch) {
  const Control& layout = me.control;
  const ReceivedRoutes& routes = job.routes;
  const int num_ranks = layout.num_ranks, chunks = routes.num_chunks;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int vectors = job.row_bytes / 16;
  int entered = -1;
  for (int unit = blockIdx.x; unit < num_ranks * chunks; unit += gridDim.x) {
    // At every moment the CTAs push to all ranks.
    const int source = (me.rank + 1 + unit) % num_ranks, chunk = unit / num_ranks;
    const bool is_home = source == me.rank;
    const std::int32_t* chunk_pair = routes.chunk_pair + source * (chunks + 1) + chunk;
    const int first = chunk_pair[0], end = chunk_pair[1];
    if (first == end || (is_home && job.w == nullptr)) continue;
    if (source != entered) {
      const bool is_free =
          wait_for(me, Phase::kCombine, source,
                   signal_word(me.control_of[me.rank], layout, kEntered, source), epoch);
      if (!all_pushing_threads(is_free)) return;
      entered = source;
    }
    for (int pair = first + warp; pair < end && !is_home; pair += kPushingWarps) {
      const int first_pick = routes.pair_first[pair], end_pick = routes.pair_first[pair + 1];
      const std::size_t place =
          static_cast<std::size_t>(routes.pair_token[pair]) * num_ranks + me.rank;
      auto* out = reinterpret_cast<uint4*>(sums_window(me, source) + place * job.row_bytes);
      for (int i = lane; i < vectors; i += kWarpSize) {
        float sum[Vector<T>::kWidth];
        clear<T>(sum);
        add_rows<T>(sum, job, first_pick, end_pick, i);
        out[i] = Vector<T>::round(sum);
      }
    }
    if (job.w != nullptr) {
      auto* values = reinterpret_cast<float*>(me.control_of[source] + layout.values());
      const int end_pick = routes.pair_first[end];
      for (int pick = routes.pair_first[first] + threadIdx.x; pick < end_pick;
           pick += kPushingThreads) {
        values[routes.pick_home[pick]] = job.w[routes.pick_slot[pick]];
      }
    }
    __threadfence_system();
    all_pushing_threads(true);
    if (threadIdx.x == 0) {
      auto* flags = reinterpret_cast<std::uint64_t*>(me.control_of[source] + layout.pushed());
      store_release(flags + me.rank * layout.max_chunks() + chunk, epoch);
    }
  }
}

// One summing warp's share of this rank's tokens.
template <typename T>
__device__ void sum_up(const Rank& me, const Combine& job, std::uint64_t epoch) {
  const Control& layout = me.control;
  const int num_ranks = layout.num_ranks, lane = threadIdx.x % kWarpSize;
  const int first = (threadIdx.x / kWarpSize - kPushingWarps) * gridDim.x + blockIdx.x;
  const int vectors = job.row_bytes / 16;
  const auto* flags =
      reinterpret_cast<const std::uint64_t*>(me.control_of[me.rank] + layout.pushed());
  const auto* values = reinterpret_cast<const float*>(me.control_of[me.rank] + layout.values());
  for (int token = first; token < job.num_tokens; token += kSummingWarps * gridDim.x) {
    const std::uint32_t ranks = job.home.token_ranks[token];
    bool is_here = true;
    // Own values come through the window too; own rows do not.
    const bool needs =
        lane < num_ranks && (ranks >> lane & 1) && (lane != me.rank || job.w != nullptr);
    if (needs) {
      is_here = wait_for(me, Phase::kCombine, lane,
                         flags + lane * layout.max_chunks() + token / kChunk, epoch);
    }
    if (!__all_sync(~0u, is_here)) return;
    const int own = job.home.own_pair[token];
    int first_pick = 0, end_pick = 0;
    if (own >= 0) {
      const int pair = job.routes.first_pair[me.rank] + own;
      first_pick = job.routes.pair_first[pair];
      end_pick = job.routes.pair_first[pair + 1];
    }
    const char* parts =
        sums_window(me, me.rank) + static_cast<std::size_t>(token) * num_ranks * job.row_bytes;
    auto* out = reinterpret_cast<uint4*>(job.out + static_cast<std::size_t>(token) * job.row_bytes);
    for (int i = lane; i < vectors; i += kWarpSize) {
      float sum[Vector<T>::kWidth];
      clear<T>(sum);
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (!(ranks >> rank & 1)) continue;
        if (rank == me.rank) {
          float part[Vector<T>::kWidth];
          clear<T>(part);
          add_rows<T>(part, job, first_pick, end_pick, i);
#pragma unroll
          for (int j = 0; j < Vector<T>::kWidth; ++j) sum[j] += part[j];
        } else {
          const char* part = parts + static_cast<std::size_t>(rank) * job.row_bytes;
          Vector<T>::add(sum, __ldcg(reinterpret_cast<const uint4*>(part) + i));
        }
      }
      out[i] = Vector<T>::round(sum);
    }
    if (job.w != nullptr) {
      const std::uint32_t picks = job.home.token_picks[token];
      if (lane < job.top_k) {
        const std::size_t place = static_cast<std::size_t>(token) * job.top_k + lane;
        job.home_w[place] = picks >> lane & 1 ? __ldcg(values + place) : 0.0f;
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(Rank me, Combine job) {
  const std::uint64_t epoch = current_epoch(me);
  if (blockIdx.x == 0 && threadIdx.x < me.control.num_ranks) {
    store_release(signal_word(me.control_of[threadIdx.x], me.control, kEntered, me.rank), epoch);
  }
  if (threadIdx.x < kPushingThreads) {
    push<T>(me, job, epoch);
  } else {
    sum_up<T>(me, job, epoch);
  }
  if (leave(me) && threadIdx.x == 0) me.state->epoch = epoch;
}

}  // namespace

void combine(const Rank& me, const Combine& arguments, int num_sms, std::uintptr_t stream) {
  const void* kernel = arguments.dtype == DType::kBFloat16
                           ? reinterpret_cast<const void*>(combine_kernel<__nv_bfloat16>)
                       : arguments.dtype == DType::kFloat16
                           ? reinterpret_cast<const void*>(combine_kernel<__half>)
                           : reinterpret_cast<const void*>(combine_kernel<float>);
  Rank rank = me;
  Combine job = arguments;
  void* parameters[] = {&rank, &job};
  cuda_check(cudaLaunchCooperativeKernel(kernel, num_sms, kThreads, parameters, 0,
                                         reinterpret_cast<cudaStream_t>(stream)),
             "launching combine");
}

}  // namespace ncclep::native
