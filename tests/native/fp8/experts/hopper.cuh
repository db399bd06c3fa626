// What FP8 products use of Hopper (csrc/experts/hopper.cuh), on the emulator.
//
// A copy happens at some time until its barrier is complete, a product either when it is asked for
// or when it is waited for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "emulator.h"

struct CUtensorMap {
  const char* base;
  long width, height;  // of the tensor, in elements
  int element, box_width, box_height;
  bool is_swizzled;
};

inline bool isinf(float value) { return std::isinf(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float __shfl_xor_sync(unsigned int, float value, int distance) {
  const long* given = emu::exchange(__float_as_uint(value));
  return __uint_as_float(static_cast<unsigned int>(given[emu::lane() ^ distance]));
}

inline float __shfl_sync(unsigned int, float value, int lane) {
  return __uint_as_float(static_cast<unsigned int>(emu::exchange(__float_as_uint(value))[lane]));
}
inline std::uint32_t __shfl_xor_sync(unsigned int, std::uint32_t value, int distance) {
  return static_cast<std::uint32_t>(emu::exchange(value)[emu::lane() ^ distance]);
}

namespace ncclep::hopper {

inline std::uint32_t to_bf16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return pair.x.bits | std::uint32_t{pair.y.bits} << 16;
}
inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
  const auto one = [](std::uint32_t x, std::uint32_t y) {
    const float u = __uint_as_float((x & 0x7fff) << 16), v = __uint_as_float((y & 0x7fff) << 16);
    return __float_as_uint(std::fmax(u, v)) >> 16;
  };
  return one(a, b) | one(a >> 16, b >> 16) << 16;
}

using Address = char*;
inline Address address_of(const void* shared) {
  return static_cast<char*>(const_cast<void*>(shared));
}
inline Address kept_address_of(const void* shared) { return address_of(shared); }

struct Barrier {
  int arrivals, missing, parity = 0;
  long bytes = 0;
  // Completes a phase: those who wait for its parity go on.
  void settle() {
    EMU_REQUIRE(missing >= 0);
    if (missing > 0 || bytes != 0) return;
    parity ^= 1;
    missing = arrivals;
  }
};
struct BoxCopy {
  char* to;
  CUtensorMap map;
  long x, y;
  Barrier* full;
};
struct Product {
  float* sums;
  std::uint32_t a, b;
  bool adds;
};

inline std::map<int, char*> shared_of;  // by CTA
inline std::map<const void*, Barrier> barriers;
inline std::vector<BoxCopy> copies;  // that have not happened
inline std::map<emu::Fiber*, std::vector<Product>> products;

constexpr int kCtas = 2;  // of a cluster

inline int cluster_rank() { return emu::self().cta->index % kCtas; }
inline int first_of_cluster() { return emu::self().cta->index / kCtas * kCtas; }
inline char* own_memory() { return emu::dynamic_shared(); }
inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const char*>(pointer) - own_memory());
}
// Where CTA `rank` of the cluster has what this one has there.
template <typename T>
T* at_rank(T* own, int rank) {
  return reinterpret_cast<T*>(shared_of.at(first_of_cluster() + rank) + shared_address(own));
}

inline void cluster_barrier() {
  static std::map<std::pair<int, int>, emu::Barrier> meetings;  // by their size too
  const int first = first_of_cluster();
  shared_of[emu::self().cta->index] = own_memory();
  const int size = kCtas * static_cast<int>(emu::self().cta->warps.size()) * emu::kWarpSize;
  meetings.try_emplace({first, size}, size).first->second.wait();
}

inline void init_barrier(Address barrier, int arrivals) {
  barriers.insert_or_assign(barrier, Barrier{arrivals, arrivals});
}
inline void fence_barriers() {}
inline void arrive_and_expect(Address barrier, int bytes) {
  Barrier& at = barriers.at(barrier);
  at.bytes += bytes;
  --at.missing;
  at.settle();
}
inline void arrive_at(Address barrier, int rank) {
  Barrier& at = barriers.at(at_rank(barrier, rank));
  --at.missing;
  at.settle();
  emu::note_progress();
  emu::yield();
}

// Byte `offset` from where a swizzled matrix begins, and back.
inline std::uint32_t swizzled(std::uint32_t offset) { return offset ^ (offset >> 3 & 0x70); }

inline void copy_box(const BoxCopy& copy) {
  const CUtensorMap& map = copy.map;
  const int pitch = map.box_width * map.element;
  for (int y = 0; y < map.box_height; ++y) {
    for (int x = 0; x < pitch; ++x) {
      const long row = copy.y + y, byte = copy.x * map.element + x;
      const bool is_inside = row < map.height && byte < map.width * map.element;
      const std::uint32_t offset = y * pitch + x;
      copy.to[map.is_swizzled ? swizzled(offset) : offset] =
          is_inside ? map.base[row * map.width * map.element + byte] : 0;
    }
  }
  copy.full->bytes -= pitch * map.box_height;
  copy.full->settle();
  emu::note_progress();
}
inline void copy_some() {
  if (copies.empty() || emu::draw(3)) return;
  const std::size_t one = emu::draw(static_cast<unsigned int>(copies.size()));
  std::swap(copies[one], copies.back());
  const BoxCopy copy = copies.back();
  copies.pop_back();
  copy_box(copy);
}
inline void wait(Address barrier, int parity) {
  const Barrier& at = barriers.at(barrier);
  while (at.parity == parity) {
    copy_some();
    emu::yield();
  }
}

inline void load_box_for(std::uint16_t ctas, Address shared, const CUtensorMap& map, int x, int y,
                         Address full) {
  EMU_REQUIRE(shared_address(shared) % (map.is_swizzled ? 1024 : 128) == 0);
  EMU_REQUIRE(x * map.element % 16 == 0);  // a GPU calls it an illegal instruction
  for (int rank = 0; rank < kCtas; ++rank) {
    if (ctas >> rank & 1) {
      copies.push_back({at_rank(shared, rank), map, x, y, &barriers.at(at_rank(full, rank))});
    }
  }
}
inline void load_box(Address shared, const CUtensorMap& map, int x, int y, Address full) {
  load_box_for(1 << cluster_rank(), shared, map, x, y, full);
}

template <int kRegisters>
void raise_registers() {}
template <int kRegisters>
void lower_registers() {}

// --- e4m3 ----------------------------------------------------------------------------------------

inline float from_fp8(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float value = exponent == 0
                          ? std::ldexp(static_cast<float>(mantissa), -9)
                          : std::ldexp(1 + static_cast<float>(mantissa) / 8, exponent - 7);
  return bits & 0x80 ? -value : value;
}
// To nearest even; what is too large becomes 448.
inline std::uint8_t to_fp8(float value) {
  if (std::isnan(value)) return 0x7f;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448) return sign | 0x7e;
  const int exponent = magnitude == 0 ? -6 : std::max(std::ilogb(magnitude), -6);
  // In units of the last place: 8 to 15 are normal, and 16 is the next exponent's 8.
  const long units = std::lrint(std::ldexp(magnitude, 3 - exponent));
  return static_cast<std::uint8_t>(sign | ((exponent + 6) * 8 + units));
}
inline std::uint32_t to_fp8(float a, float b, float c, float d) {
  return to_fp8(a) | to_fp8(b) << 8 | to_fp8(c) << 16 | static_cast<std::uint32_t>(to_fp8(d)) << 24;
}

// --- products ------------------------------------------------------------------------------------

inline std::uint32_t describe(Address rows) { return shared_address(rows) >> 4; }
inline float value_of(std::uint8_t bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all;
    for (int each = 0; each < 256; ++each) all.push_back(from_fp8(static_cast<std::uint8_t>(each)));
    return all;
  }();
  return values[bits];
}
// Byte `k` of a row of a described matrix.
inline float element(std::uint32_t matrix, int row, int k) {
  const std::uint32_t offset = (matrix << 4) + row * 128 + k;
  return value_of(static_cast<std::uint8_t>(own_memory()[swizzled(offset)]));
}
inline void multiply_now(const Product& product) {
  const int thread = emu::self().thread % 128;
  for (int i = 0; i < 64; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    float sum = product.adds ? product.sums[i] : 0;
    for (int k = 0; k < 32; ++k) {
      sum += element(product.a, row, k) * element(product.b, column, k);
    }
    product.sums[i] = sum;
  }
}
inline void begin_products() {}
inline void end_products() {}
inline void wait_for_products(float (&)[64]) {
  emu::maybe_yield();
  for (const Product& product : products[&emu::self()]) multiply_now(product);
  products[&emu::self()].clear();
  emu::warp_barrier();  // a warp waits as one
}
inline void multiply(float (&sums)[64], std::uint32_t a, std::uint32_t b, bool adds) {
  std::vector<Product>& waiting = products[&emu::self()];
  waiting.push_back({sums, a, b, adds});
  if (!emu::draw(2)) return;
  for (const Product& product : waiting) multiply_now(product);
  waiting.clear();
}

template <typename T>
T value_at(Address from) {
  EMU_REQUIRE(shared_address(from) % sizeof(T) == 0);
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
inline float load(Address from) { return value_at<float>(from); }
inline float2 load_pair(Address from) { return value_at<float2>(from); }
inline uint4 load_four(Address from) { return value_at<uint4>(from); }
inline void store(Address to, std::uint32_t value) { std::memcpy(to, &value, 4); }
inline void store_pair(Address to, float x, float y) {
  const float2 pair{x, y};
  std::memcpy(to, &pair, 8);
}

struct Store {
  CUtensorMap map;
  int x, y;
  const char* from;
  bool adds, has_ended;
};
inline std::map<emu::Fiber*, std::vector<Store>> stores;  // that have not happened

inline void store_now(const Store& store) {
  const CUtensorMap& map = store.map;
  for (int i = 0; i < map.box_width * map.box_height; ++i) {
    const int y = i / map.box_width, x = i % map.box_width;
    if (store.y + y >= map.height || store.x + x >= map.width) continue;
    const long at = (store.y + y) * map.width + store.x + x;
    char* to = const_cast<char*>(map.base) + at * map.element;
    const char* from = store.from + swizzled(i * map.element);
    if (store.adds) {
      float value, sum;
      std::memcpy(&value, from, 4);
      std::memcpy(&sum, to, 4);
      sum += value;
      std::memcpy(to, &sum, 4);
    } else {
      std::memcpy(to, from, map.element);
    }
  }
}
inline void wait_for_reads() {
  std::vector<Store>& waiting = stores[&emu::self()];
  const auto has_ended = [](const Store& store) { return store.has_ended; };
  for (const Store& store : waiting) {
    if (has_ended(store)) store_now(store);
  }
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), has_ended), waiting.end());
}
inline void show_to_copies() {}
inline void queue_store(const CUtensorMap& map, int x, int y, Address shared, bool adds) {
  EMU_REQUIRE(shared_address(shared) % 1024 == 0 && map.is_swizzled &&
              map.box_width * map.element == 128);
  stores[&emu::self()].push_back({map, x, y, shared, adds, false});
}
inline void store_box(const CUtensorMap& map, int x, int y, Address shared) {
  queue_store(map, x, y, shared, false);
}
inline void add_box(const CUtensorMap& map, int x, int y, Address shared) {
  EMU_REQUIRE(map.element == 4);
  queue_store(map, x, y, shared, true);
}
inline void end_stores() {
  for (Store& store : stores[&emu::self()]) store.has_ended = true;
  if (emu::draw(2)) wait_for_reads();
}

}  // namespace ncclep::hopper
