// One elected thread of each warp drives a ring of kStages row-sized buffers in shared memory: a
// bulk copy fills a stage, and when its barrier says so another bulk copy empties it.
//
// Example, kStages = 4, one warp, rows 0 1 2 ...: loads of rows 0, 1 and 2 are in flight before row
// 0 is stored; row 3 is loaded into the free stage 3 next, and row 4 into stage 0 once the store of
// row 0 has read it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "bench/copy_rows.h"
#include "common/cuda.h"

namespace ncclep::bench {

namespace {

constexpr int kStages = 4;
constexpr int kMaxWarps = 8;
constexpr int kSharedBytes = 200 * 1024;  // of the 227 KiB that a CTA can have
constexpr int kWarpSize = 32;

struct Peers {
  char* rows[kMaxPeers];
};

__device__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void start_load(void* stage, const void* row, int bytes, std::uint64_t* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(stage)),
      "l"(row), "r"(bytes), "r"(shared_address(full))
      : "memory");
}

__device__ void wait_for_load(std::uint64_t* full, int parity) {
  std::uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
        "selp.u32 %0, 1, 0, done; }"
        : "=r"(is_done)
        : "r"(shared_address(full)), "r"(parity)
        : "memory");
  }
}

__device__ void start_store(void* row, const void* stage, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(row),
               "r"(shared_address(stage)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <bool kPush>
__global__ void copy_rows_kernel(char* local, Peers peers, const int* peer_of_row,
                                 const int* peer_row, int num_rows, int row_bytes) {
  extern __shared__ __align__(128) char stages[];
  __shared__ __align__(8) std::uint64_t full[kMaxWarps][kStages];
  if (threadIdx.x % kWarpSize != 0) return;
  const int warp = threadIdx.x / kWarpSize;
  char* ring = stages + static_cast<std::size_t>(warp) * kStages * row_bytes;
  for (int stage = 0; stage < kStages; ++stage) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[warp][stage])));
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

  // This warp's rows are first, first + step, ...
  const int warps = blockDim.x / kWarpSize;
  const int first = blockIdx.x * warps + warp, step = gridDim.x * warps;
  const int count = first < num_rows ? (num_rows - first + step - 1) / step : 0;
  const auto local_row = [&](int row) { return local + static_cast<std::size_t>(row) * row_bytes; };
  const auto remote_row = [&](int row) {
    return peers.rows[peer_of_row[row]] + static_cast<std::size_t>(peer_row[row]) * row_bytes;
  };
  const auto load = [&](int turn) {
    const int row = first + turn * step, stage = turn % kStages;
    start_load(ring + static_cast<std::size_t>(stage) * row_bytes,
               kPush ? local_row(row) : remote_row(row), row_bytes, &full[warp][stage]);
  };

  for (int turn = 0; turn < min(count, kStages - 1); ++turn) load(turn);
  for (int turn = 0; turn < count; ++turn) {
    const int row = first + turn * step, stage = turn % kStages;
    wait_for_load(&full[warp][stage], turn / kStages % 2);
    start_store(kPush ? remote_row(row) : local_row(row),
                ring + static_cast<std::size_t>(stage) * row_bytes, row_bytes);
    if (turn + kStages - 1 < count) {
      // The next load goes into the stage before this one; all stores but the last have read
      // theirs.
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      load(turn + kStages - 1);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace

void copy_rows(const CopyRows& job, int num_sms, std::uintptr_t stream) {
  require(job.row_bytes > 0 && job.row_bytes % 16 == 0 && job.row_bytes <= kSharedBytes / kStages,
          "row_bytes ", job.row_bytes, ": must be a multiple of 16 up to ", kSharedBytes / kStages);
  require(job.peers.size() <= kMaxPeers, job.peers.size(), " peers: at most ", kMaxPeers);
  require(num_sms > 0, "num_sms ", num_sms, ": must be positive");
  Peers peers{};
  std::copy(job.peers.begin(), job.peers.end(), peers.rows);
  const int ring_bytes = kStages * job.row_bytes;
  const int warps = std::min(kMaxWarps, kSharedBytes / ring_bytes);
  const auto kernel = job.push ? copy_rows_kernel<true> : copy_rows_kernel<false>;
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, warps * ring_bytes),
      "setting the shared memory of copy_rows");
  kernel<<<num_sms, warps * kWarpSize, warps * ring_bytes,
           reinterpret_cast<cudaStream_t>(stream)>>>(job.local, peers, job.peer_of_row,
                                                     job.peer_row, job.num_rows, job.row_bytes);
  cuda_check(cudaGetLastError(), "launching copy_rows");
}

}  // namespace ncclep::bench
