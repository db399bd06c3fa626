// One elected thread of each warp drives a ring of kStages row-sized buffers in shared memory: a
// bulk copy fills a stage, and once its barrier completes another bulk copy drains it.
//
// Example, kStages = 4, one warp, rows 0 1 2 ...: loads of rows 0, 1 and 2 are in flight before row
// 0 is stored; row 3 is loaded into the free stage 3 next, and row 4 into stage 0 once the store of
// row 0 has read it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "bench/copy_rows.h"
#include "common/bulk_copy.cuh"
#include "common/cuda.h"

namespace ncclep::bench {

namespace {

constexpr int kStages = 4;
constexpr int kMaxWarps = 8;
constexpr int kSharedBytes = 200 * 1024;  // out of the 227 KiB available to a CTA
constexpr int kWarpSize = 32;

struct Peers {
  char* rows[kMaxPeers];
};

template <bool kPush>
__global__ void copy_rows_kernel(char* local, Peers peers, const int* peer_of_row,
                                 const int* peer_row, int num_rows, int row_bytes) {
  extern __shared__ __align__(128) char stages[];
  __shared__ __align__(8) std::uint64_t full[kMaxWarps][kStages];
  if (threadIdx.x % kWarpSize != 0) return;
  const int warp = threadIdx.x / kWarpSize;
  char* ring = stages + static_cast<std::size_t>(warp) * kStages * row_bytes;
  for (int stage = 0; stage < kStages; ++stage) init_barrier(&full[warp][stage]);
  fence_barriers();

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
    commit_stores();
    if (turn + kStages - 1 < count) {
      // The next load goes into the previous stage; every store but the last has read its stage.
      wait_for_reads_of_stores<1>();
      load(turn + kStages - 1);
    }
  }
  wait_for_stores();
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
