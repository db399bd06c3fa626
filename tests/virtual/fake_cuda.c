// Stands in for libcuda.so.1, as far as virtual_nccl.cpp calls it: device memory is memory of this
// process, and what is mapped twice is one memory at two addresses.
#define _GNU_SOURCE
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY (2ul << 20)

static int is_context_made = 0;
static int num_mapped = 0;   // mappings that nobody has undone
static int num_created = 0;  // allocations
static int fail_creations = 0;

int fake_num_mapped(void) { return num_mapped; }
int fake_num_created(void) { return num_created; }
void fake_fail_creations(int fails) { fail_creations = fails; }

CUresult cuInit(unsigned flags) { return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)&is_context_made;
  return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = is_context_made ? (CUcontext)&is_context_made : NULL;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  is_context_made = context != NULL;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return is_context_made ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  return limit == CU_LIMIT_STACK_SIZE && value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  *stream = (CUstream)malloc(1);
  return flags == CU_STREAM_NON_BLOCKING ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  *granularity = GRANULARITY;
  return properties->type == CU_MEM_ALLOCATION_TYPE_PINNED ? CUDA_SUCCESS
                                                           : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  if (fail_creations) return CUDA_ERROR_OUT_OF_MEMORY;
  if (size % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, size) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = file;
  ++num_created;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  --num_created;
  return close((int)handle) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  if (size % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  void* start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = (CUdeviceptr)start;
  return start != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  return munmap((void*)address, size) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// Mapped memory cannot be used before cuMemSetAccess.
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  void* mapped = mmap((void*)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, offset);
  ++num_mapped;
  return mapped != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access,
                        size_t count) {
  if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return mprotect((void*)address, size, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                     : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  --num_mapped;
  void* empty = mmap((void*)address, size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return empty != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  *address = (CUdeviceptr)malloc(size);
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  free((void*)address);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  memcpy((void*)to, from, size);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  memset((void*)to, value, count);
  return CUDA_SUCCESS;
}
