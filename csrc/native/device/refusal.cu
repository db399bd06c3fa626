#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/device/refusal.h"
#include "native/device/wait.cuh"

namespace ncclep::native {

namespace {

__global__ void refuse_kernel(KernelContext me, Phase phase) {
  const int rank = threadIdx.x;
  if (rank == me.rank) {
    report_failure(me, Reason::kRefused, phase, me.rank, current_epoch(me));
  } else if (rank < me.control.num_ranks) {
    store_relaxed(stop_word(me, rank), me.rank + 1);
  }
}

}  // namespace

void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream) {
  refuse_kernel<<<1, kMaxRanks, 0, reinterpret_cast<cudaStream_t>(stream)>>>(me, phase);
  cuda_check(cudaGetLastError(), "launching a refusal");
}

}  // namespace ncclep::native
