#include "network/rails.h"

#include <cmath>
#include <utility>
#include <vector>

#include "common/error.h"
#include "nccl/run_with_deadline.h"

namespace ncclep::network {

namespace {

std::string version_text(int code) {
  return join_text(code / 10000, ".", code % 10000 / 100, ".", code % 100);
}

// What rank `from` puts to rank `to` in one round: no two are equal.
std::uint64_t word_of(std::uint64_t round, int from, int to) {
  return round << 32 | static_cast<std::uint64_t>(from) << 16 | static_cast<std::uint64_t>(to);
}

}  // namespace

std::string problem(const Communicator& communicator) {
  const Nccl& nccl = communicator.nccl();
  const int num_ranks = communicator.num_ranks(), lsa_size = communicator.lsa_size();
  if (compiled_for() == 0) {
    return "its kernels have no network: this extension was built without the headers of NCCL "
           "2.30.7; build it again where NCCL_HOME has them in include/";
  }
  if (nccl.version() < compiled_for() || !nccl.device_comm_create) {
    return join_text("its kernels have no network: they need NCCL ", version_text(compiled_for()),
                     " or newer, and this is ", nccl.version_text(), ", ", nccl.path());
  }
  if (transport(nccl, communicator.get()) == nullptr) {
    return "NCCL offers its kernels no network (GIN) along rails: on every host it needs "
           "network cards with GPUDirect RDMA, or a plugin (NCCL_RMA_PLUGIN), and NCCL_GIN_ENABLE "
           "other than 0; "
           "NCCL_DEBUG=INFO says what it found";
  }
  if (num_ranks % lsa_size != 0) {
    return join_text(num_ranks, " ranks in NVLink domains of ", lsa_size,
                     ": rails need as many ranks in each");
  }
  return "";
}

Rails::Rails(std::shared_ptr<Communicator> communicator, double timeout_s,
             const std::function<void()>& poll, int num_signals)
    : communicator_(std::move(communicator)) {
  const std::string found = problem(*communicator_);
  ensure(found.empty(), found);
  transport_ = network::transport(communicator_->nccl(), communicator_->get());
  num_domains_ = communicator_->num_domains();
  domain_ = communicator_->rank() / communicator_->lsa_size();
  const auto made = std::make_shared<std::shared_ptr<DeviceCommunicator>>();
  const auto make = [made, whole = communicator_, number = num_signals * num_domains_] {
    *made = std::make_shared<DeviceCommunicator>(whole->shared_nccl(), whole->get(), number);
  };
  const std::string late =
      join_text("no network for kernels between the ", num_domains_, " domains within ", timeout_s,
                " s: look at the other ranks' output, or at NCCL's own with NCCL_DEBUG=INFO");
  run_with_deadline(make, late, communicator_->device(), timeout_s, poll);
  device_ = *made;
}

std::shared_ptr<const Rail> Rails::rail(const std::vector<std::shared_ptr<Window>>& windows) const {
  require(device_ != nullptr, "the network was closed");
  std::vector<NcclWindow> handles;
  for (const std::shared_ptr<Window>& window : windows) handles.push_back(window->handle());
  return device_->rail(handles);
}

void Rails::probe(const Window& window, double timeout_s) {
  require(device_ != nullptr, "the network was closed");
  require(timeout_s > 0 && timeout_s <= 1e9, "a deadline of ", timeout_s,
          " s: it must be positive, at most 1e9");
  require(window.is_open() && &window.communicator() == communicator_.get(),
          "the window is closed, or another communicator's");
  require(window.num_bytes() >= probe_bytes(), "a window of ", window.num_bytes(),
          " bytes: at least ", probe_bytes(), " are needed");
  const int rank = communicator_->rank(), lsa_size = communicator_->lsa_size();
  const auto peer_in = [&](int domain) { return rank + (domain - domain_) * lsa_size; };
  Probe job{};
  job.window = reinterpret_cast<std::uint64_t*>(window.address());
  job.domain = domain_;
  job.num_domains = num_domains_;
  job.round = ++round_;
  job.deadline_ns = static_cast<std::uint64_t>(timeout_s * 1e9);
  std::vector<std::uint64_t> words;
  for (int d = 0; d < num_domains_; ++d) words.push_back(word_of(round_, rank, peer_in(d)));
  const std::vector<Arrival> arrivals = device_->probe(window.handle(), words, job);
  for (int d = 0; d < num_domains_; ++d) {
    if (d == domain_) continue;
    if (!arrivals[d].was_taken) {
      throw PeerError(join_text("rank ", rank, " of ", communicator_->num_ranks(),
                                ": the network (", transport_, ") has not taken put number ",
                                round_, " for rank ", peer_in(d), " within ", timeout_s,
                                " s: what was put before does not get there"));
    }
    if (arrivals[d].signals < round_) {
      throw PeerError(join_text("rank ", rank, " of ", communicator_->num_ranks(), ": put number ",
                                round_, " of rank ", peer_in(d), ", of domain ", d,
                                ", has not come over the network within ", timeout_s, " s (",
                                transport_, "): look at that rank's output, and at the network"));
    }
    ensure(arrivals[d].word == word_of(round_, peer_in(d), rank), "rank ", rank, " of ",
           communicator_->num_ranks(), ": ", arrivals[d].word, " has come from rank ", peer_in(d),
           " over the network (", transport_, ") instead of ", word_of(round_, peer_in(d), rank));
  }
}

void Rails::close() {
  if (device_ != nullptr) device_->close();
  device_.reset();
}

}  // namespace ncclep::network
