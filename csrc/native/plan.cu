// A worked example: R = 2, E = 4 (rank 0 has experts 0 and 1), K = 2.
//
//     rank 0: token 0 -> experts 0, 1      rank 1: token 0 -> experts 2, 1
//             token 1 -> experts 3, 0
//
//     counts of rank 0:  experts 2 1 0 1, pairs 2 1      of rank 1:  experts 0 1 1 0, pairs 1 1
//     rows on rank 0: expert 0 from slot 0 (2 rows), expert 1 from slot 2 (2 rows)
//     rank 0's picks there: pair (token 0): slots 0 2; pair (token 1): slot 1
//     rank 1's pick there:  pair (token 0): slot 3, after rank 0's row for expert 1
//
// Places are prefix sums over tokens: inside a chunk of kChunk tokens the population count of a
// bitmap per expert, over chunks a scan, over ranks the exchanged counts.  Nothing depends on the
// order in which threads run.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/cuda.h"
#include "native/plan.h"
#include "native/wait.cuh"

namespace ncclep::native {

namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kWords = kChunk / 32;
constexpr std::uint32_t kBadBit = 1u << 31;  // of a count, in the first column
constexpr int kMaxColumns = kMaxExperts + kMaxRanks;

static_assert(kThreads >= kChunk);

// A bitmap over the tokens of a chunk for each column: which tokens have a pick or a pair there.
struct Bitmaps {
  std::uint32_t words[kMaxColumns][kWords];

  __device__ void clear(int columns) {
    for (int i = threadIdx.x; i < columns * kWords; i += kThreads)
      words[i / kWords][i % kWords] = 0;
  }
  __device__ void set(int column, int token) {
    atomicOr(&words[column][token / 32], 1u << token % 32);
  }
  __device__ int count(int column) const {
    int sum = 0;
    for (int i = 0; i < kWords; ++i) sum += __popc(words[column][i]);
    return sum;
  }
  // Tokens before `token`.
  __device__ int count_before(int column, int token) const {
    int sum = 0;
    for (int i = 0; i < token / 32; ++i) sum += __popc(words[column][i]);
    return sum + __popc(words[column][token / 32] & ((1u << token % 32) - 1));
  }
};

// Reads a token's picks into `experts`; what is no expert, or named before, becomes -1.
template <typename Index>
__device__ bool read_picks(const PlanCount& plan, int num_experts, int token, int* experts) {
  bool is_good = true;
  for (int k = 0; k < plan.top_k; ++k) {
    const Index value =
        static_cast<const Index*>(plan.topk_idx)[static_cast<std::size_t>(token) * plan.top_k + k];
    bool is_expert = value >= 0 && value < num_experts;
    is_good = is_good && (is_expert || value == -1);
    for (int j = 0; j < k && is_expert; ++j) {
      if (experts[j] == value) is_expert = is_good = false;
    }
    experts[k] = is_expert ? static_cast<int>(value) : -1;
  }
  return is_good;
}

__device__ std::uint64_t* count_word(char* control, const Control& layout, std::uint64_t plans,
                                     int source, int column) {
  return reinterpret_cast<std::uint64_t*>(control + layout.counts()) +
         (plans % 2 * layout.num_ranks + source) * layout.num_columns() + column;
}

// Waits for one count of `source`; -1 when the deadline passed.
__device__ std::int64_t wait_for_count(const Rank& me, std::uint64_t plans, int source,
                                       int column) {
  const std::uint64_t* word = count_word(me.control_of[me.rank], me.control, plans, source, column);
  std::uint64_t value = 0;
  const bool is_here = wait_until(me, Phase::kPlan, source, plans, [&] {
    value = load_acquire(word);
    return value >> 32 == (plans & 0xffffffffu);
  });
  return is_here ? static_cast<std::int64_t>(value & 0xffffffffu) : -1;
}

struct Shared {
  Bitmaps bitmaps;
  int first_slot[kMaxExperts];  // of this rank's picks for each expert, at its rank
  int padded[kMaxExperts];      // rows of each expert's block
  int routed[kMaxExperts];
  int pick_base[kMaxRanks];                       // picks for each rank before this chunk
  std::uint16_t picks_before[kMaxRanks][kChunk];  // in the chunk, before each token
};

// One CTA's share of the chunks: counts of every column, to `scratch` [chunks, columns].
template <typename Index>
__device__ void count_chunks(const Rank& me, const PlanCount& plan, Shared& shared,
                             int num_chunks) {
  const int columns = me.control.num_columns(), num_experts = me.control.num_experts;
  const int num_local = num_experts / me.control.num_ranks;
  for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    shared.bitmaps.clear(columns);
    __syncthreads();
    const int token = chunk * kChunk + threadIdx.x;
    if (threadIdx.x < kChunk && token < plan.num_tokens) {
      int experts[kMaxTopK];
      if (!read_picks<Index>(plan, num_experts, token, experts)) me.state->is_bad = 1;
      for (int k = 0; k < plan.top_k; ++k) {
        if (experts[k] < 0) continue;
        shared.bitmaps.set(experts[k], threadIdx.x);
        shared.bitmaps.set(num_experts + experts[k] / num_local, threadIdx.x);
      }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += kThreads) {
      plan.scratch[static_cast<std::size_t>(chunk) * columns + column] =
          shared.bitmaps.count(column);
    }
    __syncthreads();
  }
}

// One warp for each column: turns the chunks' counts into sums over the chunks before, and tells
// every rank the total.
__device__ void scan_and_post(const Rank& me, const PlanCount& plan, int num_chunks,
                              std::uint64_t plans) {
  const int columns = me.control.num_columns(), lane = threadIdx.x % kWarpSize;
  const int warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  for (int column = warp; column < columns; column += gridDim.x * kWarps) {
    int total = 0;
    for (int first = 0; first < num_chunks; first += kWarpSize) {
      const int chunk = first + lane;
      int* cell = plan.scratch + static_cast<std::size_t>(chunk) * columns + column;
      const int own = chunk < num_chunks ? __ldcg(cell) : 0;
      int sum = own;
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (chunk < num_chunks) __stcg(cell, total + sum - own);
      total += __shfl_sync(~0u, sum, kWarpSize - 1);
    }
    // The word for this rank itself also says that the column of `scratch` is complete.
    __threadfence();
    __syncwarp();
    std::uint32_t count = total;
    if (column == 0 && *static_cast<volatile unsigned int*>(&me.state->is_bad)) count |= kBadBit;
    if (lane < me.control.num_ranks) {
      store_release(count_word(me.control_of[lane], me.control, plans, me.rank, column),
                    plans << 32 | count);
    }
  }
}

// All ranks' counts -> where this rank's picks for each expert start, and how many rows each block
// has.  Every CTA does it for itself.  False when the deadline passed.
__device__ bool place_blocks(const Rank& me, const PlanCount& plan, Shared& shared,
                             std::uint64_t plans) {
  const Control& layout = me.control;
  const int num_local = layout.num_experts / layout.num_ranks;
  bool is_complete = true;
  for (int expert = threadIdx.x; expert < layout.num_experts; expert += kThreads) {
    int before = 0, total = 0;
    for (int source = 0; source < layout.num_ranks; ++source) {
      const std::int64_t count = wait_for_count(me, plans, source, expert);
      is_complete = is_complete && count >= 0;
      const int picks = static_cast<int>(count & ~static_cast<std::int64_t>(kBadBit));
      if (source < me.rank) before += picks;
      total += picks;
    }
    shared.first_slot[expert] = before;
    shared.routed[expert] = total;
    shared.padded[expert] = (total + plan.alignment - 1) / plan.alignment * plan.alignment;
  }
  // This rank's own pairs: not needed here, but their columns of `scratch` must be complete.
  if (threadIdx.x < layout.num_ranks) {
    is_complete &= wait_for_count(me, plans, me.rank, layout.num_experts + threadIdx.x) >= 0;
  }
  is_complete = __syncthreads_and(is_complete);
  if (!is_complete) return false;
  // One warp for each rank: its blocks lie one after the other.
  const int lane = threadIdx.x % kWarpSize;
  for (int rank = threadIdx.x / kWarpSize; rank < layout.num_ranks; rank += kWarps) {
    int start = 0;
    for (int first = 0; first < num_local; first += kWarpSize) {
      const int expert = rank * num_local + first + lane;
      const bool is_expert = first + lane < num_local;
      const int own = is_expert ? shared.padded[expert] : 0;
      int sum = own;
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (is_expert) shared.first_slot[expert] += start + sum - own;
      start += __shfl_sync(~0u, sum, kWarpSize - 1);
    }
  }
  __syncthreads();
  return true;
}

// What this rank will get: to the plan's tensors and to the host.  By one CTA.
__device__ void tell_the_host(const Rank& me, const PlanCount& plan, const Shared& shared,
                              std::uint64_t plans) {
  const Control& layout = me.control;
  const int num_local = layout.num_experts / layout.num_ranks, first = me.rank * num_local;
  for (int local = threadIdx.x; local < num_local; local += kThreads) {
    plan.tokens_per_expert[local] = shared.padded[first + local];
    plan.routed_per_expert[local] = shared.routed[first + local];
  }
  if (threadIdx.x != 0) return;
  std::int64_t rows = 0, picks = 0, pairs = 0;
  for (int local = 0; local < num_local; ++local) {
    rows += shared.padded[first + local];
    picks += shared.routed[first + local];
  }
  std::uint32_t bad_ranks = 0;
  for (int source = 0; source < layout.num_ranks; ++source) {
    pairs += max(wait_for_count(me, plans, source, layout.num_experts + me.rank), std::int64_t{0});
    if (wait_for_count(me, plans, source, 0) & kBadBit) bad_ranks |= 1u << source;
  }
  *plan.num_dropped = 0;
  me.mailbox->num_rows = rows;
  me.mailbox->num_pairs = pairs;
  me.mailbox->num_picks = picks;
  me.mailbox->num_dropped = 0;
  me.mailbox->bad_ranks = bad_ranks;
  __threadfence_system();
  me.mailbox->plans = plans;
}

// One CTA's share of the chunks: slots of all picks, for the other ranks to fetch.
template <typename Index>
__device__ void write_routes(const Rank& me, const PlanCount& plan, Shared& shared,
                             int num_chunks) {
  const Control& layout = me.control;
  const int columns = layout.num_columns(), num_experts = layout.num_experts;
  const int num_ranks = layout.num_ranks, num_local = num_experts / num_ranks;
  char* window = me.control_of[me.rank];
  auto* pair_token = reinterpret_cast<std::int32_t*>(window + layout.pair_token());
  auto* pair_first = reinterpret_cast<std::int32_t*>(window + layout.pair_first());
  auto* pick_slot = reinterpret_cast<std::int32_t*>(window + layout.pick_slot());
  auto* pick_home = reinterpret_cast<std::int32_t*>(window + layout.pick_home());
  for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const int* before = plan.scratch + static_cast<std::size_t>(chunk) * columns;
    const int token = chunk * kChunk + threadIdx.x;
    const bool has_token = threadIdx.x < kChunk && token < plan.num_tokens;
    shared.bitmaps.clear(columns);
    if (threadIdx.x < num_ranks) shared.pick_base[threadIdx.x] = 0;
    if (threadIdx.x < kChunk) {
      for (int rank = 0; rank < num_ranks; ++rank) shared.picks_before[rank][threadIdx.x] = 0;
    }
    __syncthreads();
    int experts[kMaxTopK];
    if (has_token) {
      read_picks<Index>(plan, num_experts, token, experts);
      for (int k = 0; k < plan.top_k; ++k) {
        if (experts[k] < 0) continue;
        const int rank = experts[k] / num_local;
        shared.bitmaps.set(experts[k], threadIdx.x);
        shared.bitmaps.set(num_experts + rank, threadIdx.x);
        shared.picks_before[rank][threadIdx.x] += 1;
      }
    }
    for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) {
      atomicAdd(&shared.pick_base[expert / num_local], __ldcg(before + expert));
    }
    __syncthreads();
    // One warp for each rank: numbers of picks -> numbers of picks before.
    const int lane = threadIdx.x % kWarpSize;
    for (int rank = threadIdx.x / kWarpSize; rank < num_ranks; rank += kWarps) {
      int start = 0;
      for (int first = 0; first < kChunk; first += kWarpSize) {
        const int own = shared.picks_before[rank][first + lane];
        int sum = own;
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
          const int other = __shfl_up_sync(~0u, sum, distance);
          if (lane >= distance) sum += other;
        }
        shared.picks_before[rank][first + lane] = static_cast<std::uint16_t>(start + sum - own);
        start += __shfl_sync(~0u, sum, kWarpSize - 1);
      }
    }
    __syncthreads();
    if (has_token) {
      std::uint32_t ranks = 0, picks = 0, own_picks = 0;
      std::int32_t own_first = 0;
      for (int k = 0; k < plan.top_k; ++k) {
        const int expert = experts[k];
        if (expert < 0) continue;
        const int rank = expert / num_local;
        int turn = 0;  // among the token's picks for the rank
        for (int j = 0; j < plan.top_k; ++j) {
          turn += experts[j] >= 0 && experts[j] / num_local == rank && experts[j] < expert;
        }
        const int first = shared.pick_base[rank] + shared.picks_before[rank][threadIdx.x];
        const std::size_t pick = rank * layout.picks() + first + turn;
        pick_slot[pick] = shared.first_slot[expert] + __ldcg(before + expert) +
                          shared.bitmaps.count_before(expert, threadIdx.x);
        pick_home[pick] = token * plan.top_k + k;
        picks |= 1u << k;
        if (rank == me.rank) {
          own_picks |= 1u << k;
          own_first = first;
        }
        if (ranks & 1u << rank) continue;
        ranks |= 1u << rank;
        const int pair = __ldcg(before + num_experts + rank) +
                         shared.bitmaps.count_before(num_experts + rank, threadIdx.x);
        const std::size_t place = static_cast<std::size_t>(rank) * layout.max_tokens + pair;
        pair_token[place] = token;
        pair_first[place] = first;
      }
      plan.home.token_ranks[token] = ranks;
      plan.home.token_picks[token] = picks;
      plan.home.own_picks[token] = own_picks;
      plan.home.own_first[token] = own_first;
    }
    __syncthreads();
  }
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) count_kernel(Rank me, PlanCount plan) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const std::uint64_t epoch = current_epoch(me);
  const std::uint64_t plans = *static_cast<volatile std::uint64_t*>(&me.state->plans) + 1;
  const int num_chunks = (plan.num_tokens + kChunk - 1) / kChunk;

  count_chunks<Index>(me, plan, shared, num_chunks);
  grid_barrier(me, Phase::kPlan);
  scan_and_post(me, plan, num_chunks, plans);
  if (place_blocks(me, plan, shared, plans)) {
    if (blockIdx.x == 0) tell_the_host(me, plan, shared, plans);
    write_routes<Index>(me, plan, shared, num_chunks);
  }
  if (leave(me)) {
    if (threadIdx.x < me.control.num_ranks) {
      store_release(signal_word(me.control_of[threadIdx.x], me.control, kRoutesWritten, me.rank),
                    plans);
    }
    if (threadIdx.x == 0) {
      me.state->is_bad = 0;
      me.state->plans = plans;
      me.state->epoch = epoch;
    }
  }
}

__global__ void __launch_bounds__(kThreads) receive_kernel(Rank me, ReceivedRoutes routes) {
  __shared__ int first_pair[kMaxRanks + 1], first_pick[kMaxRanks + 1];
  __shared__ int pairs_of[kMaxRanks], picks_of[kMaxRanks];
  const Control& layout = me.control;
  const int num_local = layout.num_experts / layout.num_ranks;
  const std::uint64_t epoch = current_epoch(me);
  const std::uint64_t plans = *static_cast<volatile std::uint64_t*>(&me.state->plans);
  bool is_here = true;
  if (threadIdx.x < layout.num_ranks) {
    const int source = threadIdx.x;
    is_here = wait_for(me, Phase::kRoutes, source,
                       signal_word(me.control_of[me.rank], layout, kRoutesWritten, source), plans);
    int picks = 0;
    for (int local = 0; local < num_local && is_here; ++local) {
      picks += wait_for_count(me, plans, source, me.rank * num_local + local) & ~kBadBit;
    }
    picks_of[source] = picks;
    pairs_of[source] =
        is_here ? wait_for_count(me, plans, source, layout.num_experts + me.rank) : 0;
  }
  is_here = __syncthreads_and(is_here);
  if (threadIdx.x == 0) {
    first_pair[0] = first_pick[0] = 0;
    for (int source = 0; source < layout.num_ranks; ++source) {
      first_pair[source + 1] = first_pair[source] + pairs_of[source];
      first_pick[source + 1] = first_pick[source] + picks_of[source];
    }
  }
  __syncthreads();
  if (is_here) {
    const int thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
    for (int i = 0; i < layout.num_ranks; ++i) {
      const int source = (me.rank + i) % layout.num_ranks;  // not all at the same rank at once
      const char* window = me.control_of[source];
      const auto column = [&](std::size_t offset, std::size_t stride) {
        return reinterpret_cast<const std::int32_t*>(window + offset) + me.rank * stride;
      };
      const std::int32_t* token = column(layout.pair_token(), layout.max_tokens);
      const std::int32_t* first = column(layout.pair_first(), layout.max_tokens);
      std::int32_t* chunk_pair = routes.chunk_pair + source * (routes.num_chunks + 1);
      for (int pair = thread; pair <= pairs_of[source]; pair += threads) {
        // The chunks that start between the pair before this one and this one.
        const bool is_end = pair == pairs_of[source];
        const int last_chunk = is_end ? routes.num_chunks : __ldcv(token + pair) / kChunk;
        const int first_chunk = pair == 0 ? 0 : __ldcv(token + pair - 1) / kChunk + 1;
        for (int chunk = first_chunk; chunk <= last_chunk; ++chunk) {
          chunk_pair[chunk] = first_pair[source] + pair;
        }
        if (is_end) break;
        routes.pair_token[first_pair[source] + pair] = __ldcv(token + pair);
        routes.pair_first[first_pair[source] + pair] = first_pick[source] + __ldcv(first + pair);
      }
      const std::int32_t* slot = column(layout.pick_slot(), layout.picks());
      const std::int32_t* home = column(layout.pick_home(), layout.picks());
      for (int pick = thread; pick < picks_of[source]; pick += threads) {
        routes.pick_slot[first_pick[source] + pick] = __ldcv(slot + pick);
        routes.pick_home[first_pick[source] + pick] = __ldcv(home + pick);
      }
    }
    if (blockIdx.x == 0 && threadIdx.x <= layout.num_ranks) {
      routes.first_pair[threadIdx.x] = first_pair[threadIdx.x];
      if (threadIdx.x == 0)
        routes.pair_first[first_pair[layout.num_ranks]] = first_pick[layout.num_ranks];
    }
  }
  if (leave(me) && threadIdx.x == 0) me.state->epoch = epoch;
}

}  // namespace

void plan_count(const Rank& me, const PlanCount& arguments, int num_sms, std::uintptr_t stream) {
  const auto kernel = arguments.is_int64 ? count_kernel<std::int64_t> : count_kernel<std::int32_t>;
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
      "setting the shared memory of plan");
  Rank rank = me;
  PlanCount plan = arguments;
  void* parameters[] = {&rank, &plan};
  cuda_check(cudaLaunchCooperativeKernel(kernel, num_sms, kThreads, parameters, sizeof(Shared),
                                         reinterpret_cast<cudaStream_t>(stream)),
             "launching plan");
}

void plan_receive(const Rank& me, const ReceivedRoutes& routes, int num_sms,
                  std::uintptr_t stream) {
  receive_kernel<<<num_sms, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(me, routes);
  cuda_check(cudaGetLastError(), "launching the second part of plan");
}

}  // namespace ncclep::native
