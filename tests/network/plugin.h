// What NCCL's interfaces for plugins share, in declarations of our own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rma {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

enum Result { kSuccess = 0, kCudaError = 1, kSystemError = 2, kInvalidUsage = 5, kRemoteError = 6 };
enum MemoryType { kHost = 1, kCuda = 2 };
// In which `listen` says how it can be reached.
constexpr std::size_t kHandleBytes = 128;

}  // namespace rma
