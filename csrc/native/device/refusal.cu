#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/device/rails.cuh"
#include "native/device/refusal.h"
#include "native/device/wait.cuh"

namespace ncclep::native {

namespace {

template <typename R>
__global__ void refuse_kernel(KernelContext me, Phase phase, const __grid_constant__ R rails) {
  const int rank = threadIdx.x;
  if (rank == me.rank) {
    report_failure(me, Reason::kRefused, phase, me.rank, current_epoch(me));
  } else if (rank < me.control.num_ranks && is_local(me, rank)) {
    store_relaxed(stop_word(me, rank), me.rank + 1);
  }
  if constexpr (R::kAreThere) {
    // The rail peers tell the ranks of their domains (wait.cuh).
    const std::size_t sent = RailLayout{me.control}.sent_stop();
    if (!has_rail_peer(me, threadIdx.x)) return;
    *reinterpret_cast<std::uint64_t*>(me.control_of[me.rank] + sent) = me.rank + 1;
    put(me, rails, kControlWindow, threadIdx.x, me.control.stop(), sent, 8, kStopPut);
  }
}

template <typename R>
void launch_refusal(const KernelContext& me, Phase phase, std::uintptr_t stream, const R& rails) {
  const auto kernel = refuse_kernel<R>;
  kernel<<<1, kMaxRanks, 0, reinterpret_cast<cudaStream_t>(stream)>>>(me, phase, rails);
  cuda_check(cudaGetLastError(), "launching a refusal");
}

}  // namespace

void refuse(const KernelContext& me, Phase phase, std::uintptr_t stream, const Rails* rails) {
  with_rails(rails, [&](const auto& way) { launch_refusal(me, phase, stream, way); });
}

}  // namespace ncclep::native
