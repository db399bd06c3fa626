// What the host code calls of the CUDA runtime, done in host memory; see standin.h.
#pragma once

#include <cstddef>
#include <cstring>

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
constexpr unsigned int cudaHostAllocMapped = 2, cudaEventDisableTiming = 2,
                       cudaStreamNonBlocking = 1;

namespace standin {
cudaError_t allocate(void** memory, std::size_t num_bytes);
cudaError_t free(void* memory);
// Counts a call: success, or an error when it is the one that fails.
cudaError_t result(cudaError_t otherwise = cudaSuccess);
}  // namespace standin

// --- cuda.cpp ------------------------------------------------------------------------------------

cudaError_t cudaDeviceSynchronize();
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* number);
cudaError_t cudaStreamQuery(cudaStream_t stream);

// --- what needs no more than to fail when it is told to ------------------------------------------

inline const char* cudaGetErrorString(cudaError_t) { return "the stand-in was told to fail"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, standin::result(); }
inline cudaError_t cudaSetDevice(int) { return standin::result(); }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return *stream = nullptr, standin::result();
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return standin::result(); }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 132, standin::result();
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t num_bytes, cudaStream_t) {
  return std::memset(to, value, num_bytes), standin::result();
}
// Of large memory, which is only addressed here, the two ends.
inline cudaError_t cudaMemset(void* to, int value, std::size_t num_bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 20;
  if (num_bytes <= 2 * kMost) return cudaMemsetAsync(to, value, num_bytes, nullptr);
  std::memset(to, value, kMost);
  return cudaMemsetAsync(static_cast<char*>(to) + num_bytes - kMost, value, kMost, nullptr);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t num_bytes,
                                   cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, num_bytes), standin::result();
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t num_bytes,
                              cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, num_bytes, kind, nullptr);
}
template <typename T>
cudaError_t cudaMalloc(T** memory, std::size_t num_bytes) {
  return standin::allocate(reinterpret_cast<void**>(memory), num_bytes);
}
template <typename T>
cudaError_t cudaHostAlloc(T** memory, std::size_t num_bytes, unsigned int) {
  return cudaMalloc(memory, num_bytes);
}
template <typename T>
cudaError_t cudaHostGetDevicePointer(T** device, void* host, unsigned int) {
  return *device = static_cast<T*>(host), cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) { return standin::free(memory); }
inline cudaError_t cudaFreeHost(void* memory) { return standin::free(memory); }
