// One kernel, three kinds of warps in every CTA.
//
// *Pushing* warps add up, in fp32 and in ascending order of local experts, the rows of each pair
// that came from another rank, and store the sum, rounded once, into that rank's window.  They take
// the pairs in turn, so that all have the same number of them, and at every moment push to all
// ranks.
//
// The *telling* warp keeps the books: when the sums of all pairs of a chunk of a rank's tokens are
// in that rank's window, it tells it so.
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
#include "native/wait.cuh"

namespace ncclep::native {

namespace {

constexpr int kWarpSize = 32;
constexpr int kPushingWarps = 8;
constexpr int kSummingWarps = 4;
constexpr int kTellingWarp = kPushingWarps + kSummingWarps;
constexpr int kThreads = (kPushingWarps + kSummingWarps + 1) * kWarpSize;
// Chosen for 24 to 32 CTAs: 1.2 MB and more of a rank's stores are on their way at a time.
using PushRing = Ring<6, 3>;
using SumRing = Ring<8, 2>;
constexpr int kPushStages = 6, kSumStages = 8;
constexpr int kSharedBytes = kPushingWarps * PushRing::kBytes + kSummingWarps * SumRing::kBytes;
// A pushed piece is taken for written when this many more of its warp are on their way.
constexpr int kSentAhead = 8;

struct Shared {
  alignas(8) std::uint64_t push_full[kPushingWarps][kPushStages];
  alignas(8) std::uint64_t sum_full[kSummingWarps][kSumStages];
  alignas(16) Stage push_stages[kPushingWarps][kPushStages];
  alignas(16) Stage sum_stages[kSummingWarps][kSumStages];
  const char* parts[kSummingWarps][kWarpSize];
  // By pushing warp: pairs whose sums are written, and whether there are no more to come.
  volatile int num_written[kPushingWarps];
  volatile int is_over[kPushingWarps];
};

__device__ char* sums_window(const Rank& me, int rank) {
  return me.rows_of[rank] + 2 * me.dispatch_bytes;
}

// The pairs of other ranks that one pushing warp takes, in order.
class PairCursor {
 public:
  __device__ PairCursor(const Rank& me, const ReceivedRoutes& routes, int warp)
      : first_pair_(routes.first_pair),
        rank_(me.rank),
        num_ranks_(me.control.num_ranks),
        turn_(warp * gridDim.x + blockIdx.x) {
    int most = 0;
    for (int source = 0; source < num_ranks_; ++source) {
      if (source != rank_) most = max(most, first_pair_[source + 1] - first_pair_[source]);
    }
    num_turns_ = most * (num_ranks_ - 1);
  }

  // Goes to the next pair; false when there is none.
  __device__ bool next() {
    while (turn_ < num_turns_) {
      source = (rank_ + 1 + turn_ % (num_ranks_ - 1)) % num_ranks_;
      pair = first_pair_[source] + turn_ / (num_ranks_ - 1);
      turn_ += kPushingWarps * gridDim.x;
      if (pair < first_pair_[source + 1]) return true;
    }
    return false;
  }

  int source = 0, pair = 0;

 private:
  const std::int32_t* first_pair_;
  int rank_, num_ranks_, turn_, num_turns_;
};

// One pushing warp's share of the pairs.
template <typename T>
__device__ void push(const Rank& me, const Combine& job, Shared& shared, char* memory, int warp,
                     std::uint64_t epoch) {
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize;
  PairCursor cursor(me, routes, warp);
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
    sum->part_ends = 1u << (picks - 1);
    sum->out =
        sums_window(me, current.source) +
        (static_cast<std::size_t>(current.token) * me.control.num_ranks + me.rank) * job.row_bytes;
    return true;
  };
  // Bit i: whether the piece sent i pieces ago was the last of its row.
  std::uint32_t row_ends = 0;
  int num_written = 0, num_sent = 0;
  const auto sent = [&](bool ends_row) {
    row_ends = row_ends << 1 | static_cast<std::uint32_t>(ends_row);
    num_sent += ends_row;
    wait_for_older_stores<kSentAhead>();
    if (!(row_ends >> kSentAhead & 1)) return;
    __threadfence_block();
    shared.num_written[warp] = ++num_written;
  };
  const PushRing ring{memory, shared.push_full[warp], shared.push_stages[warp]};
  add_up<T>(ring, job.row_bytes, next, sent);
  if (lane == 0) {
    __threadfence_block();
    shared.num_written[warp] = num_sent;
    __threadfence_block();
    shared.is_over[warp] = 1;
  }
}

// Lane i follows pushing warp i.
__device__ void tell(const Rank& me, const Combine& job, Shared& shared, std::uint64_t epoch) {
  const Control& layout = me.control;
  const ReceivedRoutes& routes = job.routes;
  const int lane = threadIdx.x % kWarpSize, max_chunks = layout.max_chunks();
  const bool follows = lane < kPushingWarps;
  PairCursor cursor(me, routes, follows ? lane : 0);
  auto* num_pushed = reinterpret_cast<unsigned int*>(me.control_of[me.rank] + layout.num_pushed());
  int told = 0;
  for (;;) {
    const bool is_over = !follows || shared.is_over[lane] != 0;
    const int written = follows ? shared.num_written[lane] : 0;  // after is_over
    if (!__any_sync(~0u, told < written)) {
      if (__all_sync(~0u, is_over)) return;
      __nanosleep(200);
      continue;
    }
    // What the pushing warps have seen written, every rank sees before what follows.
    __threadfence_system();
    for (; told < written && cursor.next(); ++told) {
      const int chunk = routes.pair_token[cursor.pair] / kChunk;
      const std::int32_t* chunk_pair =
          routes.chunk_pair + cursor.source * (routes.num_chunks + 1) + chunk;
      const auto pairs = static_cast<unsigned int>(chunk_pair[1] - chunk_pair[0]);
      unsigned int* count = num_pushed + cursor.source * max_chunks + chunk;
      if (atomicAdd(count, 1u) != pairs - 1) continue;
      *count = 0;  // for the next combine
      __threadfence_system();
      auto* flags =
          reinterpret_cast<std::uint64_t*>(me.control_of[cursor.source] + layout.pushed());
      store_release(flags + me.rank * max_chunks + chunk, epoch);
    }
    __syncwarp();
  }
}

// One summing warp's share of this rank's tokens.
template <typename T>
__device__ void sum_up(const Rank& me, const Combine& job, Shared& shared, char* memory, int warp,
                       std::uint64_t epoch) {
  const Control& layout = me.control;
  const ReceivedRoutes& routes = job.routes;
  const int num_ranks = layout.num_ranks, lane = threadIdx.x % kWarpSize;
  const int step = kSummingWarps * gridDim.x;
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
  int last = warp * gridDim.x + blockIdx.x - step;
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
    fence_for_bulk_copies();
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
    // All but the own rows before the last are parts of their own.
    sum->part_ends =
        own_rows > 1 ? ~(((1u << (own_rows - 1)) - 1) << own_first) : ~std::uint32_t{0};
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
  const SumRing ring{memory, shared.sum_full[warp], shared.sum_stages[warp]};
  add_up<T>(ring, job.row_bytes, next, [](bool) {});
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) combine_kernel(Rank me, Combine job) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  const std::uint64_t epoch = current_epoch(me);
  const int warp = threadIdx.x / kWarpSize;
  if (blockIdx.x == 0 && threadIdx.x < me.control.num_ranks) {
    store_release(signal_word(me.control_of[threadIdx.x], me.control, kEntered, me.rank), epoch);
  }
  if (threadIdx.x < kPushingWarps)
    shared.num_written[threadIdx.x] = shared.is_over[threadIdx.x] = 0;
  __syncthreads();
  if (warp < kPushingWarps) {
    push<T>(me, job, shared, memory + warp * PushRing::kBytes, warp, epoch);
  } else if (warp < kTellingWarp) {
    const int place = warp - kPushingWarps;
    sum_up<T>(me, job, shared, memory + kPushingWarps * PushRing::kBytes + place * SumRing::kBytes,
              place, epoch);
  } else {
    tell(me, job, shared, epoch);
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
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "setting the shared memory of combine");
  Rank rank = me;
  Combine job = arguments;
  void* parameters[] = {&rank, &job};
  cuda_check(cudaLaunchCooperativeKernel(kernel, num_sms, kThreads, parameters, kSharedBytes,
                                         reinterpret_cast<cudaStream_t>(stream)),
             "launching combine");
}

}  // namespace ncclep::native
