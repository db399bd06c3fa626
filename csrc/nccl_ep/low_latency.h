// NVIDIA's libnccl_ep in low-latency mode with rank-major rows, as the benchmark measures it.
#pragma once

#include <cstdint>
#include <memory>

#include "common/tensor.h"
#include "nccl_ep/nccl_ep.h"

namespace ncclep::nccl_ep {

// Rows [R, M, H], where M is the group's max_tokens: a place for each token of each rank; a rank
// fills the first of its places, in any order.  `stream` is a cudaStream_t.
class LowLatencyHandle : public HandleOwner {
 public:
  // Collective.  The group must be of low-latency mode.
  LowLatencyHandle(std::shared_ptr<Group> group, int top_k);

  // x [T, H], topk_idx [T, K] int64 and w [T, K] fp32 -> rows [R, M, H]; their experts, local
  // numbers or -1, int32 [R, M, K]; fp32 weights [R, M, K]; and the number of rows from each rank,
  // int32 [R].  Collective, like `combine`; queued when it returns.
  void dispatch(const Tensor& x, const Tensor& topk_idx, const Tensor& w, const Tensor& rows,
                const Tensor& row_topk_idx, const Tensor& row_w, const Tensor& counts,
                std::uintptr_t stream);
  // y [R, M, H], a row for each place -> out [T, H]: the sums over ranks.
  void combine(const Tensor& y, const Tensor& out, std::uintptr_t stream);

 private:
  void require_rows(const char* call, const Tensor& tokens, const Tensor& rows) const;
};

}  // namespace ncclep::nccl_ep
