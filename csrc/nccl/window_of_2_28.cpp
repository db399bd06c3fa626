// The only code that knows a struct of NCCL's which no header documents; to be deleted together
// with the support of NCCL 2.28.
#include "nccl/window_of_2_28.h"

#include <cstdint>
#include <cstring>

#include "common/error.h"

namespace ncclep {

namespace {

// The head of the struct that a window handle points to in device memory (NCCL 2.28.9): the ranks
// of an NVLink domain are one after the other in a flat address range.
struct WindowOnDevice {
  void* host_side;
  char* flat_base;
  int lsa_rank;
  int world_rank;
  std::uint32_t stride_4g;  // distance between consecutive ranks, in units of 2^32 bytes
};

// More ranks than any NVLink domain has.
constexpr int kMaxRanks = 4096;
// Rows are copied in vectors, and by bulk copies, of this many bytes.
constexpr std::uintptr_t kAlignment = 16;

}  // namespace

std::vector<char*> peers_in(const void* head, std::size_t num_bytes, int rank, int num_ranks) {
  WindowOnDevice window;
  require(0 <= rank && rank < num_ranks && num_ranks <= kMaxRanks, "rank ", rank, " of ", num_ranks,
          " of a window: at most ", kMaxRanks, " ranks");
  require(num_bytes >= sizeof(window), "the head of a window has ", sizeof(window), " bytes, not ",
          num_bytes);
  std::memcpy(&window, head, sizeof(window));
  const auto unknown = [](const auto&... what) {
    fail(what..., ": this NCCL lays out its windows in a way that this extension does not know");
  };
  if (window.world_rank != rank || window.lsa_rank != rank) {
    unknown("the window names rank ", window.world_rank, ", place ", window.lsa_rank,
            " of its domain, for rank ", rank);
  }
  if (window.flat_base == nullptr) unknown("the window has no address");
  if (window.stride_4g == 0 && num_ranks > 1) unknown("the window has all ranks at one address");
  if (reinterpret_cast<std::uintptr_t>(window.flat_base) % kAlignment != 0) {
    unknown("the window starts at ", static_cast<void*>(window.flat_base), ", not a multiple of ",
            kAlignment);
  }
  const std::uint64_t stride = static_cast<std::uint64_t>(window.stride_4g) << 32;
  const auto base = reinterpret_cast<std::uintptr_t>(window.flat_base);
  if (base > INTPTR_MAX || stride > (INTPTR_MAX - base) / num_ranks) {
    unknown("the window's ranks lie beyond any address: from ",
            static_cast<void*>(window.flat_base), " on, ", stride, " bytes each");
  }
  std::vector<char*> peers;
  for (int r = 0; r < num_ranks; ++r) peers.push_back(window.flat_base + r * stride);
  return peers;
}

}  // namespace ncclep
