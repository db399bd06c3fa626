#include <cuda_runtime.h>

#include <utility>

#include "common/cuda.h"
#include "network/gin.h"

#ifdef NCCLEP_NCCL_HEADERS
#include "network/rail.cuh"
#endif

namespace ncclep::network {

#ifdef NCCLEP_NCCL_HEADERS

struct DeviceCommunicator::State {
  ncclDevComm device;
};

int compiled_for() { return NCCL_VERSION_CODE; }

const char* transport(const Nccl& nccl, NcclComm comm) {
  ncclCommProperties properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  nccl.check(nccl.query_properties(comm, &properties), "ncclCommQueryProperties");
  switch (properties.railedGinType) {
    case NCCL_GIN_TYPE_NONE:
      return nullptr;
    case NCCL_GIN_TYPE_PROXY:
      return "proxy";
    case NCCL_GIN_TYPE_GDAKI:
      return "GDAKI";
    case NCCL_GIN_TYPE_GPI:
      return "GPI";
  }
  return "unknown";
}

DeviceCommunicator::DeviceCommunicator(std::shared_ptr<Nccl> nccl, NcclComm comm, int num_signals)
    : nccl_(std::move(nccl)), comm_(comm) {
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginContextCount = 1;
  needs.ginSignalCount = num_signals;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_RAIL;
  needs.ginVaSignalsRequired = false;
  auto state = std::make_unique<State>();
  nccl_->check(nccl_->device_comm_create(comm_, &needs, &state->device), "ncclDevCommCreate");
  state_ = std::move(state);
}

DeviceCommunicator::~DeviceCommunicator() = default;

void DeviceCommunicator::close() {
  if (state_ == nullptr) return;
  const std::unique_ptr<State> state = std::move(state_);
  nccl_->check(nccl_->device_comm_destroy(comm_, &state->device), "ncclDevCommDestroy");
}

std::shared_ptr<const Rail> DeviceCommunicator::rail(const std::vector<NcclWindow>& windows) const {
  require(state_ != nullptr, "the network was closed");
  require(windows.size() <= kNumWindows, windows.size(), " windows: at most ", kNumWindows);
  auto rail = std::make_shared<Rail>();
  rail->device = state_->device;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    rail->windows[i] = static_cast<ncclWindow_t>(windows[i]);
  }
  return rail;
}

std::vector<Arrival> DeviceCommunicator::probe(NcclWindow window,
                                               const std::vector<std::uint64_t>& words, Probe job) {
  const std::size_t word_bytes = words.size() * sizeof(words[0]);
  std::vector<Arrival> arrivals(words.size());
  const std::size_t arrival_bytes = arrivals.size() * sizeof(Arrival);
  void* memory = nullptr;
  cuda_check(cudaMalloc(&memory, word_bytes + arrival_bytes), "cudaMalloc");
  const std::unique_ptr<void, cudaError_t (*)(void*)> freed_at_the_end(memory, cudaFree);
  auto* const sent = static_cast<std::uint64_t*>(memory);
  job.words = sent;
  job.arrivals = reinterpret_cast<Arrival*>(sent + words.size());
  cuda_check(cudaMemcpy(sent, words.data(), word_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  network::probe(*rail({window}), job, 0);
  cuda_check(cudaDeviceSynchronize(), "putting over the network");
  cuda_check(cudaMemcpy(arrivals.data(), job.arrivals, arrival_bytes, cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  return arrivals;
}

#else

struct DeviceCommunicator::State {};

int compiled_for() { return 0; }
const char* transport(const Nccl&, NcclComm) { return nullptr; }
DeviceCommunicator::DeviceCommunicator(std::shared_ptr<Nccl>, NcclComm, int) {
  fail("compiled without NCCL's headers");
}
DeviceCommunicator::~DeviceCommunicator() = default;
void DeviceCommunicator::close() {}
std::shared_ptr<const Rail> DeviceCommunicator::rail(const std::vector<NcclWindow>&) const {
  return nullptr;
}
std::vector<Arrival> DeviceCommunicator::probe(NcclWindow, const std::vector<std::uint64_t>&,
                                               Probe) {
  return {};
}

#endif

}  // namespace ncclep::network
