// What FP8 GEMMs use of Hopper: tensor maps, barriers of a cluster, products of warpgroups.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ncclep::hopper {

// An address in shared memory.
using Address = std::uint32_t;

__device__ inline Address address_of(const void* shared) {
  return static_cast<Address>(__cvta_generic_to_shared(shared));
}
// The same where it is used often: in a cluster the compiler would ask for the CTA's number each
// time.
__device__ inline Address kept_address_of(const void* shared) {
  Address address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(address_of(shared)));
  return address;
}

// --- clusters ------------------------------------------------------------------------------------

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster meet.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- barriers in shared memory -------------------------------------------------------------------

__device__ inline void init_barrier(Address barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After init_barrier, before other CTAs of the cluster and copies use them.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies too.
__device__ inline void arrive_and_expect(Address barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier at the same address in CTA `rank` of the cluster.  What it releases are
// reads: that they are done is all that a copy into their place needs, and a release that the whole
// cluster sees would wait for all writes of the thread, as far as the L2 cache.
__device__ inline void arrive_at(Address barrier, int rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity is complete.
__device__ inline void wait(Address barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- copies into shared memory -------------------------------------------------------------------

// Copies the box of a tensor map at (x, y), x being the coordinate of contiguous elements; rows
// beyond the tensor are zeros.
__device__ inline void load_box(Address to, const CUtensorMap& map, int x, int y, Address full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(full)
      : "memory");
}

// The same into the same place of each CTA in the mask `ctas`, and their barriers.
__device__ inline void load_box_for(std::uint16_t ctas, Address to, const CUtensorMap& map, int x,
                                    int y, Address full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(full), "h"(ctas)
      : "memory");
}

// --- products ------------------------------------------------------------------------------------

template <int kRegisters>
__device__ inline void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A matrix in shared memory as products take it: rows of 128 bytes, each group of eight rows
// swizzled as a tensor map with CU_TENSOR_MAP_SWIZZLE_128B leaves it, 1024-byte aligned.  Here the
// lower half of what describes it: 16 bytes further is 1 more.
__device__ inline std::uint32_t describe(Address rows) {
  return std::uint32_t{1} << 16 | (rows & 0x3ffff) >> 4;  // without the CTA's number
}
constexpr std::uint32_t kDescribed = std::uint32_t{1} << 30 | 1024 >> 4;  // the upper half

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all products; `d`: what is read then.
__device__ inline void wait_for_products(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& each : d) asm volatile("" : "+f"(each)::"memory");  // no read moves up from below
}

// d (+)= a @ b^T: a [64, 32] and b [128, 32] in e4m3, d [64, 128] in fp32, for one warpgroup.
// Thread t has, for i < 16, d[4 i + {0, 1}]: row 16 (t / 32) + t % 32 / 4, columns 8 i + 2 (t % 4)
// and the next one; d[4 i + {2, 3}]: the same eight rows below.
__device__ inline void multiply(float (&d)[64], std::uint32_t a, std::uint32_t b, bool adds) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;\n"
      "mov.b64 a, {%64, %67}; mov.b64 b, {%65, %67};\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "a, b, p, 1, 1; }\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a), "r"(b), "r"(static_cast<int>(adds)), "r"(kDescribed));
}

// --- values in shared memory: read and written where it stands, not later
// -------------------------

__device__ inline float load(Address from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
__device__ inline float2 load_pair(Address from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(from)
               : "memory");
  return pair;
}
__device__ inline uint4 load_four(Address from) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from)
               : "memory");
  return four;
}
__device__ inline void store(Address to, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ inline void store_pair(Address to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// --- copies from shared memory -------------------------------------------------------------------

// What this thread has written there becomes what copies read.
__device__ inline void show_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Writes a box of a tensor map at (x, y).
__device__ inline void store_box(const CUtensorMap& map, int x, int y, Address from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
          &map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}
// Adds a box of an fp32 tensor map (subnormal sums may become zero).
__device__ inline void add_box(const CUtensorMap& map, int x, int y, Address from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], "
      "[%3];" ::"l"(&map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}
__device__ inline void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's stores have read their values.
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// --- values --------------------------------------------------------------------------------------

// Two values as bf16, `a` in the lower half.
__device__ inline std::uint32_t to_bf16(float a, float b) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// The larger magnitudes of two pairs of bf16; of a number and a NaN, the number's.
__device__ inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
  std::uint32_t pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  return pair;
}

// Four values as e4m3, the first one in the lowest byte; what is larger becomes the largest one.
__device__ inline std::uint32_t to_fp8(float a, float b, float c, float d) {
  std::uint32_t bytes;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

}  // namespace ncclep::hopper
