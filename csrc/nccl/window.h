// Memory that all ranks of a communicator's NVLink domain can address.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "nccl/nccl.h"

namespace ncclep {

// Who works on a window's memory: kernels of the ranks of one NVLink domain, which must be all
// ranks, or kernels of other domains too, through the network (network/rails.h).
enum class Reach { kDomain, kNetwork };

// Opening a window, and closing an open one, is collective.  An open window that is not closed
// lives until the process ends.
class Window {
 public:
  // Allocates `num_bytes` (rounded up to NCCL's 4096) on this rank.  Not collective: a rank without
  // enough memory can still tell the others, which would otherwise wait for it in `open`.
  Window(std::shared_ptr<Communicator> communicator, std::size_t num_bytes,
         Reach reach = Reach::kDomain);
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
  // The memory of every rank of this one's domain as this rank addresses it, by place in the
  // domain; by rank where all ranks are in one.
  const std::vector<char*>& peers() const { return peers_; }
  // NCCL's own, null unless open.
  NcclWindow handle() const { return window_; }
  const Communicator& communicator() const { return *communicator_; }

 private:
  // The peers as NCCL says them, and as NCCL 2.28, which does not, keeps them.
  std::vector<char*> query_peers() const;
  std::vector<char*> read_peers_from_struct() const;

  std::shared_ptr<Communicator> communicator_;
  std::size_t num_bytes_;
  char* own_ = nullptr;
  NcclWindow window_ = nullptr;
  std::vector<char*> peers_;
};

}  // namespace ncclep
