#include "native/host/needs.h"

#include <cuda_runtime.h>

#include "common/cuda.h"
#include "native/host/checks.h"
#include "native/plan/plan.h"
#include "native/rail_layout.h"
#include "native/rows/combine.h"
#include "native/rows/dispatch.h"

namespace ncclep::native {

namespace {

// With several domains, a rows window that would be larger is for rounds; of at least so many
// tokens, because each has fixed costs (docs/network.md).
constexpr std::size_t kMostRowsBytes = std::size_t{2} << 30;
constexpr int kLeastRoundTokens = 512;

struct Need {
  const char* kernel;
  std::size_t shared_bytes;
};

}  // namespace

std::string device_problem() {
  int device = 0, offered = 0;
  try {
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaDeviceGetAttribute(&offered, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    for (const Need& need :
         {Need{"plan", plan_shared_bytes()}, Need{"dispatch", dispatch_shared_bytes()},
          Need{"combine", combine_shared_bytes()}}) {
      if (need.shared_bytes <= static_cast<std::size_t>(offered)) continue;
      return join_text("the kernel of ", need.kernel, " needs up to ", need.shared_bytes,
                       " bytes of shared memory in a CTA, and the GPU offers ", offered,
                       ": use a GPU of a data center, such as sm_90 or sm_100, or the engine "
                       "'reference'");
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

WindowSizes window_sizes(Control control, int max_tokens, int top_k, std::size_t row_bytes) {
  check_sizes(max_tokens, top_k, row_bytes);
  control.max_tokens = num_chunks_of(max_tokens) * kChunk;
  control.max_top_k = top_k;
  control.num_rounds = num_rounds_for(control, row_bytes, kMostRowsBytes, kLeastRoundTokens);
  const std::size_t control_bytes =
      control.num_domains > 1 ? RailLayout{control}.end() : control.num_bytes();
  return {control, row_bytes, control_bytes, rows_window_bytes(control, row_bytes)};
}

std::int64_t rail_routes_size(const Control& control, int num_chunks) {
  const int most_tokens = num_chunks * kChunk;
  if (control.num_domains == 1) return 0;
  return RailRoutes::size(control.num_domains, most_tokens, most_tokens);
}

std::int64_t routes_size(const Control& control, std::int64_t max_pairs,
                         std::int64_t max_assignments, int num_chunks) {
  check_room(control, max_pairs, max_assignments, num_chunks);
  return rail_routes_size(control, num_chunks) +
         ReceivedRoutes::size(control.num_ranks, num_chunks, max_pairs, max_assignments);
}

}  // namespace ncclep::native
