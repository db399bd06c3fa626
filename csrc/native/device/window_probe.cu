#include <cuda_runtime.h>

#include "common/cuda.h"
#include "common/stream_order.h"
#include "native/device/wait.cuh"
#include "native/device/window_probe.h"

namespace ncclep::native {

namespace {

constexpr int kThreads = 128;

struct Access {
  std::uintptr_t address;
  std::uint64_t word;
};

__global__ void access_kernel(Access* accesses, int count, bool is_store) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    auto* address = reinterpret_cast<std::uint64_t*>(accesses[i].address);
    if (is_store) {
      store_relaxed(address, accesses[i].word);
    } else {
      accesses[i].word = load_relaxed(address);
    }
  }
}

void access(std::vector<Access>& accesses, bool is_store) {
  if (accesses.empty()) return;
  const std::size_t num_bytes = accesses.size() * sizeof(Access);
  const OwnStream own;
  auto* const stream = reinterpret_cast<cudaStream_t>(own.get());
  void* memory = nullptr;
  cuda_check(cudaMallocAsync(&memory, num_bytes, stream), "cudaMallocAsync");
  cuda_check(cudaMemcpyAsync(memory, accesses.data(), num_bytes, cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  access_kernel<<<1, kThreads, 0, stream>>>(static_cast<Access*>(memory),
                                            static_cast<int>(accesses.size()), is_store);
  cuda_check(cudaGetLastError(), "launching the check of windows");
  cuda_check(cudaMemcpyAsync(accesses.data(), memory, num_bytes, cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  cuda_check(cudaFreeAsync(memory, stream), "cudaFreeAsync");
  own.wait(is_store ? "writing to windows" : "reading windows");  // an invalid address fails here
}

}  // namespace

std::vector<std::uint64_t> load_words(const std::vector<std::uintptr_t>& addresses) {
  std::vector<Access> accesses;
  for (const std::uintptr_t address : addresses) accesses.push_back({address, 0});
  access(accesses, false);
  std::vector<std::uint64_t> words;
  for (const Access& one : accesses) words.push_back(one.word);
  return words;
}

void store_words(const std::vector<std::uintptr_t>& addresses,
                 const std::vector<std::uint64_t>& words) {
  require(addresses.size() == words.size(), addresses.size(), " addresses for ", words.size(),
          " words");
  std::vector<Access> accesses;
  for (std::size_t i = 0; i < words.size(); ++i) accesses.push_back({addresses[i], words[i]});
  access(accesses, true);
}

}  // namespace ncclep::native
