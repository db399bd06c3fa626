// One warp per message, or per token at the source rank.  Everything is in this GPU's memory and
// bound by its bandwidth, so a lane keeps several vectors of a row in flight.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda.h"
#include "hierarchical/message_packing.h"
#include "native/device/vector.cuh"

namespace ncclep::native {

namespace {

constexpr int kLanesOfRow = 32;
constexpr int kRowWarps = 8;
constexpr int kVectorsAtOnce = 4;

__device__ std::int64_t row_of_warp() {
  return static_cast<std::int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kLanesOfRow;
}

// Copies bytes of a row with one warp.
__device__ void copy_bytes(char* to, const char* from, int num_bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const int vectors = num_bytes / kMessageVector;
  for (int i = threadIdx.x % kLanesOfRow; i < vectors; i += kVectorsAtOnce * kLanesOfRow) {
    uint4 held[kVectorsAtOnce];
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      if (i + v * kLanesOfRow < vectors) held[v] = __ldg(source + i + v * kLanesOfRow);
    }
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      if (i + v * kLanesOfRow < vectors) target[i + v * kLanesOfRow] = held[v];
    }
  }
}

__global__ void pack_kernel(PackMessages job) {
  const std::int64_t message = row_of_warp();
  if (message >= job.num_messages) return;
  const std::int64_t token =
      job.token != nullptr ? __ldg(job.token + message) : message % job.tokens_each;
  if (token < 0 || token >= job.num_tokens) return;
  char* to = job.messages + message * job.message_bytes;
  copy_bytes(to, job.rows + token * job.row_bytes + job.first, job.piece_bytes);
  auto* weights = reinterpret_cast<float*>(to + job.piece_bytes);
  const int room = (job.message_bytes - job.piece_bytes) / static_cast<int>(sizeof(float));
  for (int k = threadIdx.x % kLanesOfRow; k < room; k += kLanesOfRow) {
    weights[k] = k < job.num_weights ? __ldg(job.w + token * job.num_weights + k) : 0.0f;
  }
}

__global__ void unpack_kernel(UnpackMessages job) {
  const std::int64_t message = row_of_warp();
  if (message >= job.num_messages) return;
  const char* from = job.messages + message * job.message_bytes;
  const int piece_bytes = job.row_bytes;
  copy_bytes(job.rows + message * job.row_bytes, from, piece_bytes);
  const auto* weights = reinterpret_cast<const float*>(from + piece_bytes);
  for (int k = threadIdx.x % kLanesOfRow; k < job.num_weights; k += kLanesOfRow) {
    job.w[message * job.num_weights + k] = __ldg(weights + k);
  }
}

// The message from `node` for a token; negative if there is none.
__device__ std::int64_t message_of(const AddUpMessages& job, int node, std::int64_t token) {
  return __ldg(job.message_index + node * job.num_tokens + token);
}

template <typename T>
__global__ void add_up_kernel(AddUpMessages job) {
  const std::int64_t token = row_of_warp();
  if (token >= job.num_tokens) return;
  const int lane = threadIdx.x % kLanesOfRow, vectors = job.piece_bytes / kMessageVector;
  auto* out = reinterpret_cast<uint4*>(job.out + token * job.row_bytes + job.first);
  for (int i = lane; i < vectors; i += kVectorsAtOnce * kLanesOfRow) {
    float total[kVectorsAtOnce][Vector<T>::kWidth] = {};
    for (int node = 0; node < job.num_nodes; ++node) {
      const std::int64_t message_index = message_of(job, node, token);
      if (message_index < 0) continue;
      const auto* from =
          reinterpret_cast<const uint4*>(job.messages + message_index * job.message_bytes);
      uint4 held[kVectorsAtOnce];
#pragma unroll
      for (int v = 0; v < kVectorsAtOnce; ++v) {
        if (i + v * kLanesOfRow < vectors) held[v] = __ldg(from + i + v * kLanesOfRow);
      }
#pragma unroll
      for (int v = 0; v < kVectorsAtOnce; ++v) {
        if (i + v * kLanesOfRow < vectors) Vector<T>::add(total[v], held[v]);
      }
    }
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      if (i + v * kLanesOfRow < vectors) out[i + v * kLanesOfRow] = Vector<T>::round(total[v]);
    }
  }
  if (job.topk_w == nullptr) return;
  for (int k = lane; k < job.num_weights; k += kLanesOfRow) {
    const std::int64_t assignment = token * job.num_weights + k;
    const int node = __ldg(job.assignment_node + assignment);
    const bool is_valid = node >= 0 && node < job.num_nodes;
    const std::int64_t message_index = is_valid ? message_of(job, node, token) : -1;
    const char* from = job.messages + message_index * job.message_bytes + job.piece_bytes;
    job.topk_w[assignment] =
        message_index < 0 ? 0.0f : __ldg(reinterpret_cast<const float*>(from) + k);
  }
}

template <typename Job>
void launch(void (*kernel)(Job), const Job& job, std::int64_t num_rows, std::uintptr_t stream,
            const char* call) {
  if (num_rows == 0) return;
  const auto num_blocks = static_cast<unsigned int>((num_rows + kRowWarps - 1) / kRowWarps);
  kernel<<<num_blocks, kRowWarps * kLanesOfRow, 0, reinterpret_cast<cudaStream_t>(stream)>>>(job);
  cuda_check(cudaGetLastError(), call);
}

}  // namespace

void pack_messages(const PackMessages& job, std::uintptr_t stream) {
  launch(pack_kernel, job, job.num_messages, stream, "launching pack_messages");
}

void unpack_messages(const UnpackMessages& job, std::uintptr_t stream) {
  launch(unpack_kernel, job, job.num_messages, stream, "launching unpack_messages");
}

void add_up_messages(const AddUpMessages& job, std::uintptr_t stream) {
  const auto kernel = job.dtype == ncclepBfloat16  ? add_up_kernel<__nv_bfloat16>
                      : job.dtype == ncclepFloat16 ? add_up_kernel<__half>
                                                   : add_up_kernel<float>;
  launch(kernel, job, job.num_tokens, stream, "launching add_up_messages");
}

}  // namespace ncclep::native
