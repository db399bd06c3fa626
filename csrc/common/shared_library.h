// A library found and opened at run time, so that the extension itself links to none.
#pragma once

#include <dlfcn.h>

#include <string>

#include "common/error.h"

namespace ncclep {

// Stays open for the rest of the process: threads and communicators that the library started may
// outlive any object of ours.
class SharedLibrary {
 public:
  explicit SharedLibrary(const std::string& path) : path_(path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) fail("cannot open ", path, ": ", dlerror());
  }

  const std::string& path() const { return path_; }

  // Sets `function` to the library's symbol `name`; throws when there is none.
  template <typename Function>
  void find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    ensure(function != nullptr, path_, " has no ", name, ": its version is too old or too new");
  }

  // The same, but null when there is none.
  template <typename Function>
  void find_if_any(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  std::string path_;
  void* handle_;
};

}  // namespace ncclep
