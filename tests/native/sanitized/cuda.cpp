#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "standin.h"

struct CUevent_st {
  std::uintptr_t recorded_on;
};

namespace standin {

namespace {

struct Device {
  std::set<void*> allocated;
  std::vector<std::thread> working;
  std::uintptr_t captured = 0;
  std::atomic<int> num_working{0};
  int num_calls = 0, left_until_failure = -1;
};

Device& device() {
  static Device one;
  return one;
}

// Counts a call; an error when it is the one that fails.
cudaError_t result(cudaError_t otherwise = cudaSuccess) {
  ++device().num_calls;
  if (device().left_until_failure < 0 || device().left_until_failure-- > 0) return otherwise;
  return cudaErrorMemoryAllocation;
}

}  // namespace

void fail_after(int num_calls) { device().left_until_failure = num_calls; }
int num_calls() { return device().num_calls; }
int num_allocations() { return static_cast<int>(device().allocated.size()); }
void forget(void* memory) { device().allocated.erase(memory); }
void capture(std::uintptr_t stream) { device().captured = stream; }

void run_on_device(std::function<void()> work) {
  ++device().num_working;
  device().working.emplace_back([work = std::move(work)] {
    work();
    --device().num_working;
  });
}

void require(bool holds, const char* text) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", text);
  std::abort();
}

void touch(void* memory, std::size_t num_bytes) {
  auto* bytes = static_cast<volatile char*>(memory);
  // One byte of each 8 that a sanitizer tells apart, and the last.
  for (std::size_t i = 0; i < num_bytes; i += 8) bytes[i] = bytes[i];
  if (num_bytes > 0) bytes[num_bytes - 1] = bytes[num_bytes - 1];
}

cudaError_t allocate(void** memory, std::size_t num_bytes) {
  if (const cudaError_t error = result(); error != cudaSuccess) return error;
  *memory = std::malloc(num_bytes);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xa5, num_bytes);
  device().allocated.insert(*memory);
  return cudaSuccess;
}

cudaError_t free(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  require(device().allocated.erase(memory) == 1, "memory is freed that nobody allocated");
  std::free(memory);
  return cudaSuccess;
}

}  // namespace standin

using standin::device;
using standin::result;

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "the stand-in was told to fail";
}

cudaError_t cudaGetDevice(int* current) {
  *current = 0;
  return result();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 132;
  return result();
}

cudaError_t cudaDeviceSynchronize() {
  for (std::thread& work : device().working) work.join();
  device().working.clear();
  return result();
}

cudaError_t cudaMemset(void* to, int value, std::size_t num_bytes) {
  if (const cudaError_t error = result(); error != cudaSuccess) return error;
  std::memset(to, value, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind) {
  if (const cudaError_t error = result(); error != cudaSuccess) return error;
  std::memcpy(to, from, num_bytes);
  return cudaSuccess;
}

// Streams do at once what is queued.
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t num_bytes, cudaStream_t) {
  return cudaMemset(to, value, num_bytes);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(to, from, num_bytes, kind);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  if (const cudaError_t error = result(); error != cudaSuccess) return error;
  void* memory = nullptr;
  if (const cudaError_t error = standin::allocate(&memory, sizeof(CUevent_st))) return error;
  *event = new (memory) CUevent_st{};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return standin::free(event); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->recorded_on = reinterpret_cast<std::uintptr_t>(stream);
  return result();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned int) {
  standin::touch(event, sizeof(*event));
  return result();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  standin::touch(event, sizeof(*event));
  return result(device().num_working > 0 ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t) {
  return result(device().num_working > 0 ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
  *number = reinterpret_cast<std::uintptr_t>(stream);
  return result();
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* number) {
  const auto handle = reinterpret_cast<std::uintptr_t>(stream);
  const bool is_captured = handle != 0 && handle == device().captured;
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *number = handle;
  return result();
}
