// Memory that all ranks of a communicator's NVLink domain can address.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "nccl/nccl.h"

namespace ncclep {

// The ranks' addresses, by rank, from the first `num_bytes` bytes of the struct that a window
// handle points to.  `head` may be longer than the part that is read.  Throws unless the addresses
// are plausible.
std::vector<char*> peers_in(const void* head, std::size_t num_bytes, int rank, int num_ranks);

// Opening a window, and closing an open one, is collective.  An open window that is not closed
// lives until the process ends.
class Window {
 public:
  // Allocates `num_bytes` (rounded up to NCCL's 4096) on this rank.  Not collective: a rank without
  // enough memory can still tell the others, which would otherwise wait for it in `open`.
  Window(std::shared_ptr<Communicator> communicator, std::size_t num_bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Maps the memory of all ranks here.  Throws when NCCL cannot: no CUDA peer-to-peer access, ranks
  // outside one NVLink domain.
  void open();
  void close();

  bool is_open() const { return window_ != nullptr; }
  std::size_t num_bytes() const { return num_bytes_; }
  // This rank's own memory.
  char* address() const { return own_; }
  // Every rank's memory as this rank addresses it, by rank.
  const std::vector<char*>& peers() const { return peers_; }

 private:
  std::shared_ptr<Communicator> communicator_;
  std::size_t num_bytes_;
  char* own_ = nullptr;
  NcclWindow window_ = nullptr;
  std::vector<char*> peers_;
};

}  // namespace ncclep
