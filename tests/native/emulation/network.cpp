// Sequences of probes of the network between domains of ranks (csrc/network/probe.h).
#include "machine/network.h"

#include <algorithm>
#include <map>
#include <utility>

#include "native/device/rails.cuh"
#include "network/probe.h"
#include "network/rail.cuh"
#include "sequence.h"

using namespace ncclep::network;

namespace {

constexpr int kWindowBytes = 4096;
constexpr std::uint64_t kDeadlineNs = emu::kJump * 1000;

std::uint64_t word_of(std::uint64_t round, int from, int to) {
  return round << 32 | static_cast<std::uint64_t>(from) << 16 | static_cast<std::uint64_t>(to);
}

class Probes : public Sequence {
 public:
  Probes(int ranks, int domains, const Starts& starts)
      : Sequence({ranks, 1, 8, 1, 16, starts}),
        domains_(domains),
        local_(ranks / domains),
        network_(ranks, local_, domains) {
    for (int rank = 0; rank < ranks; ++rank) {
      Memory& window = windows_.emplace_back(kWindowBytes, kGarbage);
      network_.add_window(rank, window.data<char>(), kWindowBytes);
    }
  }

  int num_steps() const override { return 12; }

  void run(int rank, int step) override {
    std::vector<std::uint64_t> words;
    const int domain = rank / local_;
    const auto peer_in = [&](int d) { return d * local_ + rank % local_; };
    for (int d = 0; d < domains_; ++d) words.push_back(word_of(step, rank, peer_in(d)));
    std::vector<Arrival> arrivals(domains_);
    const Probe job{
        windows_[rank].data<std::uint64_t>(), words.data(), arrivals.data(), domain, domains_,
        static_cast<std::uint64_t>(step) + 1, kDeadlineNs};
    launch(rank, [&] { probe({&network_, rank}, job, rank); });
    for (int d = 0; d < domains_; ++d) {
      require(d == domain || arrivals[d].word == word_of(step, peer_in(d), rank),
              "probe: the word of rank ", peer_in(d), " on rank ", rank, " in round ", step);
      require(d == domain || arrivals[d].signals > static_cast<std::uint64_t>(step),
              "probe: signals of rank ", peer_in(d));
    }
  }

  void require_at_rest() override {
    require(network_.is_at_rest(), "a put is on its way at the end");
  }
  int last_kernel() const override { return num_steps(); }
  bool may_go_on(Failing, int, bool) const override { return true; }
  void check_failure(int, int, Failing, int) override {}

 private:
  const int domains_, local_;
  emu::Network network_;
  std::deque<Memory> windows_;
};

}  // namespace

int draw_domains(int ranks) {
  std::vector<int> domains;
  for (int number = 2; number <= ranks; ++number) {
    if (ranks % number == 0) domains.push_back(number);
  }
  return domains[emu::draw(domains.size())];
}

std::unique_ptr<Sequence> draw_probes(int ranks, const Starts& starts) {
  return std::make_unique<Probes>(ranks, draw_domains(ranks), starts);
}

// --- groups of several domains -------------------------------------------------------------------

struct Wires {
  emu::Network network;
  std::map<std::pair<int, int>, ncclep::native::Rails> rails;  // by rank and window
};

void EndWires::operator()(Wires* wires) const { delete wires; }

void Sequence::make_wires() {
  const int num_signals = ncclep::native::kNumRailSignals * sizes.domains;
  wires_.reset(new Wires{{sizes.ranks, sizes.ranks / sizes.domains, num_signals}, {}});
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    for (auto* windows : {&control_, &rows_}) {
      Memory& window = (*windows)[rank];
      wires_->network.add_window(rank, window.data<char>(), window.num_bytes());
    }
  }
}

void Sequence::cut(int rank, const std::function<bool()>& is_over) {
  const int domain = (sizes.domain_of(rank) + emu::between(1, sizes.domains - 1)) % sizes.domains;
  wires_->network.stop(rank, domain, is_over);
}

bool Sequence::has_bytes_on_the_way(int rank) const {
  return wires_->network.has_bytes_on_the_way(rank);
}

void Sequence::let_everything_arrive() {
  while (!wires_->network.is_at_rest()) wires_->network.get_further();
}

const ncclep::native::Rails* Sequence::rails(int rank, int window) {
  if (wires_ == nullptr) return nullptr;
  return &(wires_->rails[{rank, window}] = {{&wires_->network, rank, window}});
}

void Sequence::add_to_network(int rank, Memory& window) {
  if (wires_ != nullptr) wires_->network.add_window(rank, window.data<char>(), window.num_bytes());
}
