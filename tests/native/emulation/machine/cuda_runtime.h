// What the kernels use of CUDA, on the emulator.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "emulator.h"

#define __device__
#define __noinline__
#define __host__
#define __global__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}

using std::max;
using std::min;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

// --- where a thread is ---------------------------------------------------------------------------

struct Place {
  unsigned int x;
};
#define threadIdx (Place{static_cast<unsigned int>(emu::self().thread)})
#define blockIdx (Place{static_cast<unsigned int>(emu::self().cta->index)})
#define gridDim (Place{static_cast<unsigned int>(emu::self().cta->grid)})
#define blockDim (Place{static_cast<unsigned int>(32 * emu::self().cta->warps.size())})

// --- barriers, fences, votes ---------------------------------------------------------------------

inline int __syncthreads_and(bool vote) { return emu::cta_barrier(vote); }
inline int __syncthreads_or(bool vote) { return !__syncthreads_and(!vote); }
inline void __syncthreads() { __syncthreads_and(true); }
inline void __syncwarp() {
  emu::warp_barrier();
  emu::maybe_yield();
}
inline void fence(emu::Scope scope) {
  emu::take_step(true);
  emu::acquire(scope);
  emu::release(scope);
  emu::maybe_yield();
}
inline void __threadfence_block() { fence(emu::kCta); }
inline void __threadfence() { fence(emu::kGpu); }
inline void __threadfence_system() { fence(emu::kSystem); }
inline void __nanosleep(unsigned int) { emu::yield(); }
// The lanes whose values `is_meant` accepts, one bit each.
template <typename IsMeant>
unsigned int lanes_of(long value, IsMeant&& is_meant) {
  const long* values = emu::exchange(value);
  unsigned int lanes = 0;
  for (int i = 0; i < emu::kWarpSize; ++i)
    lanes |= static_cast<unsigned int>(is_meant(values[i])) << i;
  return lanes;
}
inline unsigned int __ballot_sync(unsigned int, bool vote) {
  return lanes_of(vote, [](long given) { return given != 0; });
}
inline bool __all_sync(unsigned int, bool vote) { return __ballot_sync(~0u, vote) == ~0u; }
inline bool __any_sync(unsigned int, bool vote) { return __ballot_sync(~0u, vote) != 0; }
inline unsigned int __match_any_sync(unsigned int, int value) {
  return lanes_of(value, [value](long given) { return given == value; });
}
template <typename T>
T __shfl_sync(unsigned int, T value, int lane) {
  return static_cast<T>(emu::exchange(static_cast<long>(value))[lane]);
}
inline int __shfl_xor_sync(unsigned int, int value, int distance) {
  return __shfl_sync(~0u, value, emu::lane() ^ distance);
}
inline int __reduce_max_sync(unsigned int, int value) {
  const long* given = emu::exchange(value);
  return static_cast<int>(*std::max_element(given, given + emu::kWarpSize));
}
// The value of the lane itself where there is no such lane.
inline int __shfl_up_sync(unsigned int, int value, int distance) {
  const int lane = emu::lane();
  return __shfl_sync(~0u, value, lane < distance ? lane : lane - distance);
}

// --- memory --------------------------------------------------------------------------------------

template <typename T>
T __ldcg(const T* from) {
  T value;
  emu::load(&value, from, sizeof(T), emu::self().view.seen);
  return value;
}
// What others may change at any time (translate.py).
template <typename T>
T load_volatile(const T* from) {
  emu::note_read(from, emu::scope_of(from));
  return *from;
}
// Of what nobody writes meanwhile.
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcv(const T* from) {
  return __ldcg(from);
}
template <typename T, typename Value>
void __stcg(T* to, Value value) {
  *to = value;
}

// Replaces a word by what `change` makes of it; returns what it was.
template <typename T, typename Change>
T atomically(T* word, Change&& change) {
  emu::maybe_yield();
  const T was = *word;
  const T is = change(was);
  const emu::Scope scope = emu::scope_of(word);
  emu::note_read(word, scope);
  emu::note_write(word, scope, true);
  emu::store_for_all(word, &is, sizeof(T));
  if (is == was) {
    emu::yield();  // a look, perhaps again and again
  } else {
    emu::note_progress();
  }
  return was;
}
template <typename T>
T atomicAdd(T* word, T value) {
  return atomically(word, [value](T was) { return was + value; });
}
template <typename T>
T atomicOr(T* word, T value) {
  return atomically(word, [value](T was) { return was | value; });
}
template <typename T>
T atomicMax(T* word, T value) {
  return atomically(word, [value](T was) { return was < value ? value : was; });
}
template <typename T>
T atomicExch(T* word, T value) {
  return atomically(word, [value](T) { return value; });
}

// --- bits ----------------------------------------------------------------------------------------

inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(unsigned long long bits) { return __builtin_ffsll(bits); }
inline float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
