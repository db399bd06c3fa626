// NCCL's network for kernels (GIN, NCCL 2.30.7 and newer) on the host's side.  With rail.cuh this
// is the only part of the extension that is compiled with NCCL's own headers; without them it has
// no device communicators.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nccl/nccl.h"
#include "network/probe.h"

namespace ncclep::network {

// The release of NCCL whose headers this was compiled with, in the form of `Nccl::version`, and the
// oldest that it runs with; 0: none.  All functions below need one.
int compiled_for();

// What kernels use a device communicator through, with the windows that they put into.
struct Rail;

// How NCCL brings kernels' puts to other domains along rails, such as "proxy"; null: it does not.
const char* transport(const Nccl& nccl, NcclComm comm);

// NCCL's struct that kernels use the network through.
class DeviceCommunicator {
 public:
  // Collective; waits for the other ranks.
  DeviceCommunicator(std::shared_ptr<Nccl> nccl, NcclComm comm, int num_signals);
  ~DeviceCommunicator();
  // Collective.
  void close();

  std::shared_ptr<const Rail> rail(const std::vector<NcclWindow>& windows) const;

  // Runs `job` (probe.h) on the default stream, which is idle at the end.  Its words are `words`,
  // and what has arrived is returned, by domain.
  std::vector<Arrival> probe(NcclWindow window, const std::vector<std::uint64_t>& words, Probe job);

 private:
  struct State;
  std::shared_ptr<Nccl> nccl_;
  NcclComm comm_;
  std::unique_ptr<State> state_;
};

}  // namespace ncclep::network
