// Sequences of probes of the network between domains of ranks (csrc/network/probe.h).
#include "network/probe.h"
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
        probed_(ranks, local_, domains) {
    for (int rank = 0; rank < ranks; ++rank) {
      Memory& window = windows_.emplace_back(kWindowBytes, kGarbage);
      probed_.add_window(rank, window.data<char>(), kWindowBytes);
    }
  }

  int num_steps() const override { return 12; }

  void run(int rank, int step) override {
    const int domain = rank / local_;
    const auto peer_in = [&](int d) { return d * local_ + rank % local_; };
    std::vector<std::uint64_t> words;
    for (int d = 0; d < domains_; ++d) words.push_back(word_of(step, rank, peer_in(d)));
    std::vector<Arrival> arrivals(domains_);
    const Probe job{
        windows_[rank].data<std::uint64_t>(), words.data(), arrivals.data(), domain, domains_,
        static_cast<std::uint64_t>(step) + 1, kDeadlineNs};
    launch(rank, [&] { probe({&probed_, rank}, job, rank); });
    for (int d = 0; d < domains_; ++d) {
      require(d == domain || arrivals[d].word == word_of(step, peer_in(d), rank),
              "probe: the word of rank ", peer_in(d), " on rank ", rank, " in round ", step);
      require(d == domain || arrivals[d].signals > static_cast<std::uint64_t>(step),
              "probe: signals of rank ", peer_in(d));
    }
  }

  void require_at_rest() override {
    require(probed_.is_at_rest(), "a put is on its way at the end");
  }

 private:
  const int domains_, local_;
  emu::Network probed_;
  std::deque<Memory> windows_;
};

}  // namespace

std::unique_ptr<Sequence> draw_probes(int ranks, int domains, const Starts& starts) {
  return std::make_unique<Probes>(ranks, domains, starts);
}
