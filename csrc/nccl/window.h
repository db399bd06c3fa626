// Memory that all ranks of a communicator's NVLink domain can address.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "nccl/nccl.h"

namespace ncclep {

// Making and closing it is collective.  An object that nobody closes is left to the end of the
// process.
class Window {
 public:
  // Allocates `num_bytes` (rounded up to NCCL's 4096) on every rank and maps all of them here.
  // Throws when NCCL cannot: no CUDA peer-to-peer access, ranks outside one NVLink domain.
  Window(std::shared_ptr<Communicator> communicator, std::size_t num_bytes);

  void close();

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
