// CUDA's driver, opened when memory of a GPU comes, so that the network also runs without a GPU.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct Driver {
  int (*get_context)(void**);
  int (*set_context)(void*);
  int (*get_device)(int*);
  int (*new_context)(void**, unsigned, int);
  int (*end_context)(void*);
  int (*new_stream)(void**, unsigned);
  int (*end_stream)(void*);
  int (*wait)(void*);
  int (*to_host)(void*, std::uint64_t, std::size_t, void*);
  int (*to_device)(std::uint64_t, const void*, std::size_t, void*);
  int (*pin)(void*, std::size_t, unsigned);
  int (*unpin)(void*);

  bool open() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    const auto find = [&](const char* name, auto& function) {
      void* found = library ? dlsym(library, name) : nullptr;
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
      return found != nullptr;
    };
    return find("cuCtxGetCurrent", get_context) && find("cuCtxSetCurrent", set_context) &&
           find("cuCtxGetDevice", get_device) && find("cuCtxCreate_v2", new_context) &&
           find("cuCtxDestroy_v2", end_context) && find("cuStreamCreate", new_stream) &&
           find("cuStreamDestroy_v2", end_stream) && find("cuStreamSynchronize", wait) &&
           find("cuMemcpyDtoHAsync_v2", to_host) && find("cuMemcpyHtoDAsync_v2", to_device) &&
           find("cuMemHostRegister_v2", pin) && find("cuMemHostUnregister", unpin);
  }
};

// Makes another context current, for as long as it lives.
class Within {
 public:
  Within(const Driver* driver, void* context) : driver_(driver) {
    is_ready_ =
        !driver || (driver->get_context(&before_) == 0 && driver->set_context(context) == 0);
  }
  ~Within() {
    if (driver_) driver_->set_context(before_);
  }
  Within(const Within&) = delete;
  explicit operator bool() const { return is_ready_; }

 private:
  const Driver* driver_;
  void* before_ = nullptr;
  bool is_ready_;
};
