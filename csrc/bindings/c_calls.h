// How the bindings call the C interface: results to exceptions, tensors, callbacks.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "c_interface/handles.h"
#include "common/error.h"
#include "include/ncclep.h"

namespace ncclep::bindings {

// The exception of a callback; the call that it ended raises it again.
inline thread_local std::exception_ptr raised;

inline void check(ncclepResult_t result) {
  if (result == ncclepSuccess) return;
  if (result == ncclepInterrupted && raised) {
    std::rethrow_exception(std::exchange(raised, nullptr));
  }
  const char* text = ncclepGetLastError();
  if (result == ncclepRemoteError) throw PeerError(text);
  if (result == ncclepInvalidUsage) throw UsageError(text);
  throw Error(text);
}

inline void* pointer(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

inline ncclepDataType_t c_dtype(DType dtype) { return static_cast<ncclepDataType_t>(dtype); }

class Group {
 public:
  Group(const std::shared_ptr<Communicator>& communicator, int num_experts, double timeout_s)
      : num_ranks_(communicator->num_ranks()) {
    ncclepGroupConfig_t config = NCCLEP_GROUP_CONFIG_INIT;
    config.num_experts = num_experts;
    config.timeout_s = timeout_s;
    config.all_gather = &Group::call_all_gather;
    config.poll = [](void*) { return look_for_signals(); };
    config.user = this;
    ncclepComm comm{communicator};
    check(ncclepGroupCreate(&group_, &comm, &config));
  }
  // Frees only local memory: closing is collective.
  ~Group() { delete group_; }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  ncclepGroup_t get() const { return group_; }

  void close() {
    if (group_ == nullptr) return;
    const py::gil_scoped_release unlocked;
    check(ncclepGroupDestroy(group_));
    group_ = nullptr;
  }

  // Has `all_gather` answer the group's calls while `call` runs, without the interpreter's lock.
  template <typename Call>
  void with_all_gather(const py::function& all_gather, Call&& call) {
    all_gather_ = &all_gather;
    ncclepResult_t result;
    {
      const py::gil_scoped_release unlocked;
      result = call();
    }
    all_gather_ = nullptr;
    check(result);
  }

  ncclepGroupInfo_t info() const {
    ncclepGroupInfo_t info = NCCLEP_GROUP_INFO_INIT;
    // A closed group has nothing.
    if (group_ != nullptr) check(ncclepGroupGetInfo(group_, &info));
    return info;
  }

 private:
  static int look_for_signals() {
    try {
      raise_signals();
      return 0;
    } catch (...) {
      raised = std::current_exception();
      return 1;
    }
  }

  static ncclepResult_t call_all_gather(void* user, const void* mine, std::size_t num_bytes,
                                        void* all, const char* what, double timeout_s) {
    const py::gil_scoped_acquire locked;
    try {
      const auto& self = *static_cast<Group*>(user);
      const py::bytes sent(static_cast<const char*>(mine), num_bytes);
      const py::bytes received = (*self.all_gather_)(sent, what, timeout_s);
      const std::string_view theirs = received;
      require(theirs.size() == self.num_ranks_ * num_bytes, "all_gather returned ", theirs.size(),
              " bytes: ", self.num_ranks_ * num_bytes, " were expected");
      std::memcpy(all, theirs.data(), theirs.size());
      return ncclepSuccess;
    } catch (...) {
      raised = std::current_exception();
      return ncclepInterrupted;
    }
  }

  int num_ranks_;
  ncclepGroup_t group_ = nullptr;
  const py::function* all_gather_ = nullptr;
};

}  // namespace ncclep::bindings
