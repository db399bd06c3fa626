// What the lives are made of: a communicator over the stand-in for NCCL, tensors, and failures.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases.h"
#include "common/shared_library.h"
#include "common/tensor.h"
#include "nccl/nccl.h"
#include "standin.h"

using ncclep::Communicator;
using ncclep::DType;
using ncclep::Nccl;
using ncclep::Tensor;

// So many ranks that others than those that add send, from scratch.
constexpr int kRanks = 8, kExperts = 16, kTokens = 5, kTopK = 2, kHidden = 8;
constexpr std::uintptr_t kStream = 0x100, kOtherStream = 0x200;
constexpr int kMostCalls = 500;  // of one life

// The stand-in for libnccl and libnccl_ep.
inline const char* library_path() { return std::getenv("NCCLEP_FAKE_LIBRARY"); }

struct Fake {
  Fake() : library(library_path()) {
    library.find("fake_fail_after", fail_after);
    library.find("fake_make_windows", make_windows);
    library.find("fake_num_alive", num_alive);
  }
  ncclep::SharedLibrary library;
  void (*fail_after)(int, int);
  void (*make_windows)(int);
  int (*num_alive)();
};

inline Fake& fake() {
  static Fake one;
  return one;
}

inline std::shared_ptr<Communicator> make_communicator(int num_ranks = kRanks, int rank = 1) {
  fake().make_windows(1);
  auto nccl = std::make_shared<Nccl>(library_path());
  return std::make_shared<Communicator>(nccl, nccl->unique_id(), num_ranks, rank);
}

// A tensor with memory of its very size.
struct Owned {
  Owned(DType dtype, std::vector<std::int64_t> shape) {
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    memory.reset(new char[tensor.num_elements() * itemsize_of(dtype)]());
    tensor.data = memory.get();
  }
  operator const Tensor&() const { return tensor; }
  Tensor tensor;
  std::unique_ptr<char[]> memory;
};

// Lives `life` again and again, with call number 0, 1, 2, ... of what `fail_after` counts failing,
// until it does not come to that call any more.
template <typename FailAfter, typename Life>
void with_every_call_failing(FailAfter&& fail_after, Life&& life) {
  for (int call = 0; call < kMostCalls; ++call) {
    fail_after(call);
    bool has_failed = false;
    try {
      life();
    } catch (const ncclep::Error&) {
      has_failed = true;
    }
    fail_after(-1);
    if (!has_failed) {
      REQUIRE(call > 3);
      return;
    }
  }
  REQUIRE(!"it never comes to an end");
}

// Of NCCL's communicators, windows and memory, and of CUDA's memory and events: how many there are.
inline int num_alive() { return fake().num_alive() + standin::num_allocations(); }

inline void fail_nccl_after(int calls) {
  fake().fail_after(calls < 0 ? 0 : calls, calls < 0 ? 0 : 3);
}
