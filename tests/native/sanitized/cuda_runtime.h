// What the host code calls of the CUDA runtime; cuda.cpp does it in host memory.
#pragma once

#include <cstddef>

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
constexpr unsigned int cudaHostAllocMapped = 2, cudaEventDisableTiming = 2,
                       cudaStreamNonBlocking = 1;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t num_bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* number);
cudaError_t cudaStreamQuery(cudaStream_t stream);

namespace standin {
cudaError_t allocate(void** memory, std::size_t num_bytes);
cudaError_t free(void* memory);
}  // namespace standin

inline cudaError_t cudaMemset(void* to, int value, std::size_t num_bytes) {
  return cudaMemsetAsync(to, value, num_bytes, nullptr);
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
  return standin::allocate(reinterpret_cast<void**>(memory), num_bytes);
}
template <typename T>
cudaError_t cudaHostGetDevicePointer(T** device, void* host, unsigned int) {
  *device = static_cast<T*>(host);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) { return standin::free(memory); }
inline cudaError_t cudaFreeHost(void* memory) { return standin::free(memory); }
