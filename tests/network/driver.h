// CUDA's driver, opened when memory of a GPU comes, so that the network also runs without a GPU.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <type_traits>

struct Driver {
  using Address = std::uint64_t;
  struct Place {
    int type, id;
  };
  struct Access {
    Place place;
    int flags;
  };
  struct CopyOptions {
    int source_order;
    Place source, target;
    unsigned flags;
  };
  static constexpr int kNotReady = 600, kDeviceType = 1, kReadWrite = 3, kFileHandle = 1;
  static constexpr int kInStreamOrder = 1, kNonBlocking = 1, kNoTiming = 2;
  static constexpr unsigned kOverlapWithKernels = 1;
  static constexpr int kCanWriteValues = 122, kRelaxedCapture = 2;

  int (*get_context)(void**);
  int (*set_context)(void*);
  int (*exchange_capture)(int*);
  int (*get_device)(int*);
  int (*get_attribute)(int*, int, int);
  int (*new_context)(void**, unsigned, int);
  int (*end_context)(void*);
  int (*new_stream)(void**, unsigned);
  int (*end_stream)(void*);
  int (*wait)(void*);
  int (*new_event)(void**, unsigned);
  int (*end_event)(void*);
  int (*record)(void*, void*);
  int (*query)(void*);
  int (*to_host)(void*, Address, std::size_t, void*);
  int (*to_device)(Address, const void*, std::size_t, void*);
  int (*write_value)(void*, Address, std::uint64_t, unsigned);
  // Many copies in any order.  Null: the driver is older than CUDA 13.
  int (*copy_all)(Address*, Address*, std::size_t*, std::size_t, CopyOptions*, std::size_t*,
                  std::size_t, void*);
  int (*pin)(void*, std::size_t, unsigned);
  int (*unpin)(void*);
  // Allocations by handles, and where they are mapped.
  int (*range_of)(Address*, std::size_t*, Address);
  int (*retain)(std::uint64_t*, void*);
  int (*export_file)(void*, std::uint64_t, int, unsigned long long);
  int (*import_file)(std::uint64_t*, void*, int);
  int (*release)(std::uint64_t);
  int (*reserve)(Address*, std::size_t, std::size_t, Address, unsigned long long);
  int (*free_reserved)(Address, std::size_t);
  int (*map)(Address, std::size_t, std::size_t, std::uint64_t, unsigned long long);
  int (*unmap)(Address, std::size_t);
  int (*set_access)(Address, std::size_t, const Access*, std::size_t);

  bool open() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    const auto find = [&](const char* name, auto& function) {
      void* found = library ? dlsym(library, name) : nullptr;
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
      return found != nullptr;
    };
    find("cuMemcpyBatchAsync_v2", copy_all);
    return find("cuCtxGetCurrent", get_context) && find("cuCtxSetCurrent", set_context) &&
           find("cuThreadExchangeStreamCaptureMode", exchange_capture) &&
           find("cuCtxGetDevice", get_device) && find("cuDeviceGetAttribute", get_attribute) &&
           find("cuCtxCreate_v2", new_context) && find("cuCtxDestroy_v2", end_context) &&
           find("cuStreamCreate", new_stream) && find("cuStreamDestroy_v2", end_stream) &&
           find("cuStreamSynchronize", wait) && find("cuEventCreate", new_event) &&
           find("cuEventDestroy_v2", end_event) && find("cuEventRecord", record) &&
           find("cuEventQuery", query) && find("cuMemcpyDtoHAsync_v2", to_host) &&
           find("cuMemcpyHtoDAsync_v2", to_device) &&
           find("cuStreamWriteValue64_v2", write_value) && find("cuMemHostRegister_v2", pin) &&
           find("cuMemHostUnregister", unpin) && find("cuMemGetAddressRange_v2", range_of) &&
           find("cuMemRetainAllocationHandle", retain) &&
           find("cuMemExportToShareableHandle", export_file) &&
           find("cuMemImportFromShareableHandle", import_file) && find("cuMemRelease", release) &&
           find("cuMemAddressReserve", reserve) && find("cuMemAddressFree", free_reserved) &&
           find("cuMemMap", map) && find("cuMemUnmap", unmap) && find("cuMemSetAccess", set_access);
  }

  // Says what failed.
  static bool ok(int error, const char* what) {
    if (error != 0) fprintf(stderr, "test network: %s: CUDA error %d\n", what, error);
    return error == 0;
  }
};
