// One kernel, two kinds of CTAs (split.h).
//
// *Pushing* warps add up, in fp32 and in ascending order of local experts, the rows of each pair
// that came from another rank, and store the sum, rounded once, into that rank's window.  The
// *telling* warp of a pushing CTA keeps the books: when the sums of all pairs of a chunk of a
// rank's tokens are in that rank's window, it tells it so.
//
// *Summing* warps wait for the chunks of this rank's own tokens and add the ranks' parts up in
// ascending order, this rank's own part straight from its rows, unrounded.
//
// The window for sums has a row for each (token, rank).  Nobody pushes into a rank's window before
// that rank has entered this combine, and so has left the one before.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/cuda.h"
#include "native/add_up.cuh"
#include "native/combine.h"
#include "native/split.h"
#include "native/wait.cuh"

namespace ncclep::native {

namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 16;  // of a CTA; in a pushing CTA the last one tells
constexpr int kPushingWarps = kWarps - 1;
using PushRing = Ring<3, 3>;
using SumRing = Ring<5, 0>;
// Fences hold up the stores of the whole SM: the books are kept now and then only.
constexpr int kBookPauses = 8, kBookPauseNs = 500;

struct Shared {
  union {
    PushRing push[kPushingWarps];
    SumRing sum[kWarps];
  } rings;
  const char* parts[kWarps][kWarpSize];
  // By pushing warp: pairs whose sums are written, and whether there are no more to come.
  volatile int num_pushed[kPushingWarps];
  volatile int is_over[kPushingWarps];
};

__device__ char* sums_window(const Rank& me, int rank) {
  return me.rows_of[rank] + 2 * me.dispatch_bytes;
}

// The pairs that one pushing warp takes, in order: of one other rank, so that warps do not all
// change from rank to rank at once, and every so many-th, so that all warps end at the same time.
class PairCursor {
 public:
  __device__ PairCursor(const Rank& me, const ReceivedRoutes& routes, int num_ctas, int warp) {
    const int others = me.control.num_ranks - 1;
    if (others == 0) return;
    const int place = warp * num_ctas + blockIdx.x, warps = kPushingWarps * num_ctas;
    source = (me.rank + 1 + place % others) % me.control.num_ranks;
    step_ = (warps - place % others + others - 1) / others;  // warps for this rank
    next_ = routes.first_pair[source] + place / others;
    end_ = routes.first_pair[source + 1];
  }

  // Goes to the next pair; false when there is none.
  __device__ bool next() {
    if (next_ >= end_) return false;
    pair = next_;
    next_ += step_;
    return true;
  }

  int source = 0, pair = 0;

 private:
  int next_ = 0, end_ = 0, step_ = 0;
};

// One pushing warp's share of the pairs.
template <typename T>
__device__ void push(const Rank& me, const Combine& job, Shared& shared, int num_ctas, int warp,
                     std::uint64_t epoch) {
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize;
  PairCursor cursor(me, routes, num_ctas, warp);
  // Routes are read ahead: of the pair after the next, where its picks are; of the next, its slots.
  struct Pair {
    bool is_there = false;
    int source = 0, token = 0, first = 0, end = 0;
    int slot = 0, home = 0;  // of this lane's pick
  };
  const auto find = [&] {
    Pair pair;
    pair.is_there = cursor.next();
    if (pair.is_there) {
      pair.source = cursor.source;
      pair.token = routes.pair_token[cursor.pair];
      pair.first = routes.pair_first[cursor.pair];
      pair.end = routes.pair_first[cursor.pair + 1];
    }
    return pair;
  };
  const auto find_slots = [&](Pair& pair) {
    if (!pair.is_there || lane >= pair.end - pair.first) return;
    pair.slot = routes.pick_slot[pair.first + lane];
    if (job.has_weights) pair.home = routes.pick_home[pair.first + lane];
  };
  Pair current, following = find(), second = find();
  find_slots(following);
  std::uint32_t entered = 0;
  float weight = 0;
  const auto next = [&](Sum* sum) {
    if (job.has_weights && current.is_there && lane < current.end - current.first) {
      auto* values = reinterpret_cast<float*>(me.control_of[current.source] + me.control.values());
      values[current.home] = weight;
    }
    current = following;
    if (!current.is_there) return false;
    following = second;
    second = find();
    find_slots(following);
    if (!(entered >> current.source & 1)) {
      const auto* word = signal_word(me.control_of[me.rank], me.control, kEntered, current.source);
      const bool is_in = wait_for(me, Phase::kCombine, current.source, word, epoch);
      if (!__all_sync(~0u, is_in)) return current.is_there = false;
      entered |= 1u << current.source;
    }
    const int picks = current.end - current.first;
    if (job.has_weights && lane < picks) weight = job.w[current.slot];
    sum->row = job.y + static_cast<std::size_t>(current.slot) * job.row_bytes;
    sum->num_rows = picks;
    sum->part_begin = sum->part_end = 0;
    sum->out =
        sums_window(me, current.source) +
        (static_cast<std::size_t>(current.token) * me.control.num_ranks + me.rank) * job.row_bytes;
    return true;
  };
  int num_pushed = 0;
  const auto written = [&] {
    __threadfence_block();
    shared.num_pushed[warp] = ++num_pushed;
  };
  add_up<T, false>(shared.rings.push[warp], job.row_bytes, next, written);
  __threadfence_block();
  if (lane == 0) shared.is_over[warp] = 1;
}

// Lane i follows pushing warp i.
__device__ void tell(const Rank& me, const Combine& job, Shared& shared, int num_ctas,
                     std::uint64_t epoch) {
  const Control& layout = me.control;
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize, max_chunks = layout.max_chunks();
  const bool follows = lane < kPushingWarps;
  PairCursor cursor(me, routes, num_ctas, follows ? lane : 0);
  auto* num_pushed = reinterpret_cast<unsigned int*>(me.control_of[me.rank] + layout.num_pushed());
  int told = 0;
  for (bool is_over = false; !is_over;) {
    for (int pause = 0; pause < kBookPauses && !is_over; ++pause) {
      __nanosleep(kBookPauseNs);
      is_over = __all_sync(~0u, !follows || shared.is_over[lane] != 0);
    }
    const int pushed = follows ? shared.num_pushed[lane] : 0;  // after is_over
    if (!__any_sync(~0u, told < pushed)) continue;
    // What the pushing warps know to be written, every rank sees before what follows.
    __threadfence_system();
    for (; told < pushed && cursor.next(); ++told) {
      const int chunk = routes.pair_token[cursor.pair] / kChunk;
      const std::int32_t* chunk_pair =
          routes.chunk_pair + cursor.source * (routes.num_chunks + 1) + chunk;
      const auto pairs = static_cast<unsigned int>(chunk_pair[1] - chunk_pair[0]);
      unsigned int* count = num_pushed + cursor.source * max_chunks + chunk;
      if (atomicAdd(count, 1u) != pairs - 1) continue;
      *count = 0;  // for the next combine
      auto* flags =
          reinterpret_cast<std::uint64_t*>(me.control_of[cursor.source] + layout.pushed());
      store_release(flags + me.rank * max_chunks + chunk, epoch);
    }
    __syncwarp();
  }
}

// One summing warp's share of this rank's tokens.
template <typename T>
__device__ void sum_up(const Rank& me, const Combine& job, Shared& shared, int cta, int num_ctas,
                       int warp, std::uint64_t epoch) {
  const Control& layout = me.control;
  const ReceivedRoutes& routes = job.routes;
  const int num_ranks = layout.num_ranks, lane = threadIdx.x % kWarpSize;
  const int step = kWarps * num_ctas;
  const auto* flags =
      reinterpret_cast<const std::uint64_t*>(me.control_of[me.rank] + layout.pushed());
  const auto* values = reinterpret_cast<const float*>(me.control_of[me.rank] + layout.values());
  const int first_own = routes.pair_first[routes.first_pair[me.rank]];
  // As in `push`: of the token after the next, its masks; of the next, its own slots.
  struct Token {
    int token = 0;
    std::uint32_t ranks = 0, picks = 0, own_picks = 0;
    int first = 0, slot = 0;
  };
  int last = warp * num_ctas + cta - step;
  const auto find = [&] {
    Token token;
    token.token = last += step;
    if (token.token < job.num_tokens) {
      token.ranks = job.home.token_ranks[token.token];
      token.picks = job.home.token_picks[token.token];
      token.own_picks = job.home.own_picks[token.token];
      token.first = job.home.own_first[token.token];
    }
    return token;
  };
  const auto find_slots = [&](Token& token) {
    if (lane < __popc(token.own_picks)) {
      token.slot = routes.pick_slot[first_own + token.first + lane];
    }
  };
  Token following = find(), second = find();
  find_slots(following);
  const char** parts = shared.parts[warp];
  const auto next = [&](Sum* sum) {
    const Token token = following;
    if (token.token >= job.num_tokens) return false;
    following = second;
    second = find();
    find_slots(following);
    const std::uint32_t others = token.ranks & ~(1u << me.rank);
    const bool is_part = lane < num_ranks && (others >> lane & 1);
    bool is_here = true;
    if (is_part) {
      is_here = wait_for(me, Phase::kCombine, lane,
                         flags + lane * layout.max_chunks() + token.token / kChunk, epoch);
    }
    if (!__all_sync(~0u, is_here)) return false;
    // Parts of lower ranks, own rows, parts of higher ranks.
    const int own_rows = __popc(token.own_picks);
    const std::uint32_t lower_lanes = (1u << lane) - 1, lower_ranks = (1u << me.rank) - 1;
    const int own_first = __popc(others & lower_ranks);
    if (is_part) {
      parts[__popc(others & lower_lanes) + (lane > me.rank ? own_rows : 0)] =
          sums_window(me, me.rank) +
          (static_cast<std::size_t>(token.token) * num_ranks + lane) * job.row_bytes;
    }
    if (lane < own_rows) {
      parts[own_first + lane] = job.y + static_cast<std::size_t>(token.slot) * job.row_bytes;
    }
    __syncwarp();
    sum->row = parts[lane];
    __syncwarp();
    sum->num_rows = __popc(others) + own_rows;
    sum->part_begin = own_first;
    sum->part_end = own_first + (own_rows > 1 ? own_rows : 0);
    sum->out = job.out + static_cast<std::size_t>(token.token) * job.row_bytes;
    if (job.has_weights) {
      const std::size_t first = static_cast<std::size_t>(token.token) * job.top_k;
      if (lane < job.top_k && !(token.own_picks >> lane & 1)) {
        job.home_w[first + lane] = token.picks >> lane & 1 ? __ldcg(values + first + lane) : 0.0f;
      }
      if (lane < own_rows) {
        job.home_w[routes.pick_home[first_own + token.first + lane]] = job.w[token.slot];
      }
    }
    return true;
  };
  add_up<T, true>(shared.rings.sum[warp], job.row_bytes, next, [] {});
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1)
    combine_kernel(Rank me, Combine job, Split split) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const std::uint64_t epoch = current_epoch(me);
  const int warp = threadIdx.x / kWarpSize;
  if (blockIdx.x == 0 && threadIdx.x < me.control.num_ranks) {
    store_release(signal_word(me.control_of[threadIdx.x], me.control, kEntered, me.rank), epoch);
  }
  if (threadIdx.x < kPushingWarps) {
    shared.num_pushed[threadIdx.x] = shared.is_over[threadIdx.x] = 0;
  }
  __syncthreads();
  const int summing_cta = static_cast<int>(blockIdx.x) - split.senders;
  if (summing_cta >= 0) {
    sum_up<T>(me, job, shared, summing_cta, split.receivers, warp, epoch);
  } else if (warp < kPushingWarps) {
    push<T>(me, job, shared, split.senders, warp, epoch);
  } else {
    tell(me, job, shared, split.senders, epoch);
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
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
      "setting the shared memory of combine");
  Split split = split_combine(num_sms, me.control.num_ranks, arguments.top_k);
  // Every other rank has a pushing warp at least.
  require(split.senders * kPushingWarps >= me.control.num_ranks - 1, num_sms, " SMs for ",
          me.control.num_ranks, " ranks: too few");
  Rank rank = me;
  Combine job = arguments;
  void* parameters[] = {&rank, &job, &split};
  cuda_check(cudaLaunchCooperativeKernel(kernel, num_sms, kWarps * kWarpSize, parameters,
                                         sizeof(Shared), reinterpret_cast<cudaStream_t>(stream)),
             "launching combine");
}

}  // namespace ncclep::native
