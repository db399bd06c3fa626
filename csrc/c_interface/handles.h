// The handles of the C interface, and how its functions return errors.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/tensor.h"
#include "include/ncclep.h"
#include "native/host/group.h"
#include "native/low_latency/host.h"
#include "nccl/nccl.h"

struct ncclepComm {
  std::shared_ptr<ncclep::Communicator> communicator;
};

struct ncclepGroup {
  std::shared_ptr<ncclep::native::Group> group;
  ncclepGroupConfig_t config;
};

struct ncclepPlan {
  ncclep::native::Plan plan;
};

struct ncclepLowLatency {
  std::shared_ptr<ncclep::native::LowLatency> low_latency;
};

namespace ncclep::c_interface {

// The result for the exception that is being handled; its text becomes this thread's last error.
ncclepResult_t result_of_exception();

// Calls `body`; an exception becomes a result.
template <typename Body>
ncclepResult_t guarded(Body&& body) {
  try {
    body();
    return ncclepSuccess;
  } catch (...) {
    return result_of_exception();
  }
}

// The object that a handle stands for.
template <typename Handle>
Handle& at(Handle* handle, const char* name) {
  require(handle != nullptr, "the ", name, " was closed, or is NULL");
  return *handle;
}

template <typename T>
T& out(T* pointer, const char* name) {
  require(pointer != nullptr, name, ": NULL");
  return *pointer;
}

inline native::Group& group_at(ncclepGroup_t group) { return *at(group, "native group").group; }

// Throws InterruptedError when the caller's `poll` says so.
std::function<void()> poll_of(ncclepPoll_t poll, void* user);
// The group's all-gather: the caller's, or NCCL's.
native::AllGather all_gather_of(const ncclepGroup& group);

}  // namespace ncclep::c_interface
