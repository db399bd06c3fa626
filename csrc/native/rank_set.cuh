// Sets of ranks of an NVLink domain, with a bit for each local rank: a word or, in the kernels for
// domains of more ranks (state.h), a word for each group of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "native/state.h"

namespace ncclep::native {

struct WideRankSet {
  std::uint32_t words[kMaxRankGroups] = {};

  // The `number`-th word is word(number).
  template <typename Word>
  __device__ static WideRankSet of(Word&& word) {
    WideRankSet made;
#pragma unroll
    for (int group = 0; group < kMaxRankGroups; ++group) made.words[group] = word(group);
    return made;
  }
  __device__ WideRankSet operator~() const {
    return of([&](int group) { return ~words[group]; });
  }
  __device__ WideRankSet operator&(const WideRankSet& other) const {
    return of([&](int group) { return words[group] & other.words[group]; });
  }
  __device__ WideRankSet& operator|=(const WideRankSet& other) {
    return *this = of([&](int group) { return words[group] | other.words[group]; });
  }
  __device__ explicit operator bool() const {
    std::uint32_t any = 0;
#pragma unroll
    for (int group = 0; group < kMaxRankGroups; ++group) any |= words[group];
    return any != 0;
  }
};

constexpr bool kIsWide = kRankGroups > 1;
using RankSet = std::conditional_t<kIsWide, WideRankSet, std::uint32_t>;

// The ranks of one group.
template <typename Set>
__device__ std::uint32_t word_of(Set ranks, [[maybe_unused]] int group) {
  if constexpr (kIsWide)
    return ranks.words[group];
  else
    return ranks;
}

// The rank with this local rank.
template <typename Set = RankSet>
__device__ Set one_rank(int local_rank) {
  if constexpr (kIsWide) {
    return Set::of(
        [&](int group) { return local_rank / kWarpSize == group ? 1u << local_rank % 32 : 0; });
  } else {
    return 1u << local_rank;
  }
}

// Those before it.
template <typename Set = RankSet>
__device__ Set ranks_before(int local_rank) {
  if constexpr (kIsWide) {
    return Set::of([&](int group) {
      const int bits = local_rank - group * kWarpSize;
      return bits >= kWarpSize ? ~0u : bits > 0 ? (1u << bits) - 1 : 0;
    });
  } else {
    return (1u << local_rank) - 1;
  }
}

template <typename Set>
__device__ bool has_rank(Set ranks, int local_rank) {
  if constexpr (kIsWide)
    return static_cast<bool>(ranks & one_rank(local_rank));
  else
    return ranks >> local_rank & 1;
}

__device__ inline int number_of(std::uint32_t ranks) { return __popc(ranks); }
__device__ inline int number_of(const WideRankSet& ranks) {
  int number = 0;
#pragma unroll
  for (int group = 0; group < kMaxRankGroups; ++group) number += __popc(ranks.words[group]);
  return number;
}

// An array of sets as the host knows it.
template <typename Word>
__device__ auto* rank_sets(Word* words) {
  using Set = std::conditional_t<std::is_const_v<Word>, const RankSet, RankSet>;
  return reinterpret_cast<Set*>(words);
}

}  // namespace ncclep::native
