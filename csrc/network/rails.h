// The network as kernels use it: between ranks with one place in each NVLink domain, along a rail.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "nccl/window.h"
#include "network/gin.h"

namespace ncclep::network {

// Why kernels of the communicator's ranks have no network between their NVLink domains; empty if
// they have one.
std::string problem(const Communicator& communicator);

// Construction and closing are collective, over all ranks of the communicator.  Rails that are not
// closed live until the process ends.
class Rails {
 public:
  // Each rail peer has `num_signals` signals here.  Throws when this extension, the loaded NCCL or
  // the machines have no network for kernels, with what would help, and PeerError when not all
  // ranks come within `timeout_s` seconds.
  Rails(std::shared_ptr<Communicator> communicator, double timeout_s,
        const std::function<void()>& poll, int num_signals = 1);

  int num_domains() const { return num_domains_; }
  // For kernels that put into these windows, in their order.
  std::shared_ptr<const Rail> rail(const std::vector<std::shared_ptr<Window>>& windows) const;
  // How NCCL moves what kernels put; "proxy": through a thread on the CPU.
  const char* transport() const { return transport_; }

  // Bytes of a window that `probe` overwrites, at its start.
  std::size_t probe_bytes() const { return probe_words(num_domains_) * sizeof(std::uint64_t); }
  // Has a kernel put a word to each rail peer, and finds what each peer's put here.  Collective
  // along a rail; `window` reaches over the network.  Throws PeerError when a peer's put has not
  // come, or this rank's was not taken, within `timeout_s` seconds of the kernel's start, and Error
  // when a word is wrong; these rails are of no use then.
  void probe(const Window& window, double timeout_s);

  void close();

 private:
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<DeviceCommunicator> device_;
  int num_domains_ = 0, domain_ = 0;
  const char* transport_ = nullptr;
  std::uint64_t round_ = 0;
};

}  // namespace ncclep::network
