// Sequences of steps of a group's ranks, drawn at random, and the memory of the ranks.
//
// Kinds of sequences, with shapes of their own (rows.cpp, low_latency.cpp):
//
//   rows         plans, dispatches and combines, with rows of one piece and of several
//   dispatches   one dispatch after the other, of smaller shapes
//   combines     one combine after the other, of some chunks
//   chunks       more chunks of tokens than a CTA holds, and many CTAs
//   many         two plans, the first with invalid assignments, and one step of each other kind, of
//                small shapes, for more ranks than a warp has lanes
//   experts      more experts on a rank than a warp has lanes, and many assignments
//   plans        one plan after the other, with invalid assignments
//   failures     a rank stops, comes late, refuses a call or makes another one (rounds.cpp)
//   late         the same with CTAs that start late
//   calls        a rank makes another call
//   ll           low-latency dispatches and combines of one or two objects
//   ll-many      the same, small, for more ranks than a warp has lanes, in several domains
//   ll-failures  the same with a rank as in `failures`, which may also not take turns
//   probes       probes of the network between domains of ranks (network.cpp)
//   rails-...    any of the above but ll-many, in several domains; of rows and plans, some in
//                rounds
//   rails-cut    what a rank puts to one of its rail peers gets no further, for good or until the
//                rank gives up
//   rails-ll-cut the same in low-latency mode
//   short-...    any of these over queues of few places
//   wide-...     many or failures, also rails-many, of small shapes, for more ranks of a domain
//                than a warp has lanes; in the program with the kernels for such domains
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "machine/network.h"
#include "memory.h"
#include "native/device/rails.cuh"
#include "native/rail_layout.h"
#include "native/state.h"
#include "routing.h"

constexpr int kSms = 8;  // CTAs of a kernel, at most

// A kind of sequences by its parts.
struct Kind {
  explicit Kind(const std::string& text) : name(text) {
    is_short = takes("short-");
    is_wide = takes("wide-");
    has_rails = takes("rails-");
    is_low_latency = takes("ll");
    takes("-");
    const std::set<std::string> failing{"late", "calls", "failures", "cut"};
    has_failure = failing.count(name) > 0;
  }

  bool is_short, is_wide, has_rails, is_low_latency, has_failure;
  std::string name;  // what is left

 private:
  bool takes(const std::string& part) {
    const bool is_next = name.rfind(part, 0) == 0;
    if (is_next) name.erase(0, part.size());
    return is_next;
  }
};

// How a rank, the victim, does not do what the others expect.
enum class Failing { kStops, kComesLate, kHasLateCta, kRefuses, kDiffers, kIsCut };

using Bytes = std::vector<std::vector<char>>;

// Memory of all ranks of a group, and the steps that they make.
class Sequence {
 public:
  explicit Sequence(const Sizes& sizes);
  virtual ~Sequence();

  virtual int num_steps() const = 0;
  // Makes a step as the host of `rank` does, to its end, and checks what the kernels deliver: the
  // oracle's results, or NaN if the group has failed on this rank.
  virtual void run(int rank, int step) = 0;
  // The bytes of all windows but those of `rank`.
  virtual Bytes windows_but_of(int rank);
  virtual void require_at_rest();

  // Failures: the last kernel of a rank, numbered from 0, that others miss if the rank stops before
  // it; whether a step may become another call; and whether hosts agree in a step, so that it
  // is not queued when its group has failed.
  virtual int last_kernel() const { return num_steps(); }
  virtual bool can_differ(int) const { return true; }
  virtual bool is_agreed(int) const { return false; }
  // Whether a rank can wait in a step for one thing only.
  virtual bool waits_for_one_thing(int) const { return false; }
  // Whether a rank, the victim or another, may get to the end although the victim has stopped in
  // this step.
  virtual bool may_go_on(Failing, int, bool /* is_victim */) const { return true; }
  // Checks what a rank whose group has failed in this step says of it.
  virtual void check_failure(int /* rank */, int /* step */, Failing, int /* victim */) {}
  void refuse(int rank);
  // `is_cut`: something stays on its way.
  void settle(bool is_cut = false);
  // Stops what a rank puts to a rail peer, until `is_over()`.
  void cut(int rank, const std::function<bool()>& is_over);

  const Sizes sizes;
  std::deque<ncclep::native::State> states;
  std::deque<ncclep::native::Mailbox> mailboxes;
  std::vector<std::uint64_t> deadlines_ns;
  // Called before each kernel of a step; a call has several where it is made in rounds.
  std::function<void(int rank, bool begins_call)> before_kernel = [](int, bool) {};
  int differing = -1;  // the rank whose next steps are other calls

 protected:
  ncclep::native::KernelContext context(int rank, std::uint64_t call = 0);
  // Null in one domain; `window`: the first that kernels know, which are a control window, a rows
  // window, and those that were added.
  const ncclep::native::Rails* rails(int rank, int window = 0) {
    if (!network_) return nullptr;
    return &(rails_[{rank, window}] = {{&*network_, rank, window}});
  }
  void add_to_network(int rank, Memory& window) {
    if (network_) network_->add_window(rank, window.data<char>(), window.num_bytes());
  }
  bool has_failed(int rank) const { return states[rank].failed != 0; }
  // Queues a call's kernels on the rank's stream and waits until they are over.
  void launch(int rank, const std::function<void()>& queue);

  // What a combine makes of a rank's tokens, where the rows of a pair add up to `sum(expert rank,
  // pair, i)` on an expert rank: sums in the order of ranks and domains.
  template <typename Sum>
  std::vector<float> combined(const Routing& routing, int rank, int hidden, const Numbers& numbers,
                              Sum&& sum) const {
    std::vector<float> total(routing.num_tokens[rank] * hidden, 0), of_domain(total);
    for (int expert_rank = 0; expert_rank < sizes.ranks; ++expert_rank) {
      // What a rank adds up for its domain it adds up unrounded: its own rows, or its rail peer's.
      const bool is_own = sizes.local_rank_of(expert_rank) == sizes.local_rank_of(rank);
      for (const Pair& pair : routing.pairs[expert_rank]) {
        for (int i = 0; pair.source == rank && i < hidden; ++i) {
          const float part = sum(expert_rank, pair, i);
          of_domain[pair.token * hidden + i] += is_own ? part : numbers.round(part);
        }
      }
      if (sizes.local_rank_of(expert_rank + 1) != 0) continue;  // the domain's last rank
      for (std::size_t i = 0; i < total.size(); ++i) {
        total[i] += sizes.domains == 1 ? of_domain[i] : numbers.round(of_domain[i]);
        of_domain[i] = 0;
      }
    }
    return total;
  }

 private:
  enum class Call { kNone, kBegins, kGoesOn };

  ncclep::native::KernelContext shared_{};
  std::vector<Call> calls_;                                     // by rank
  std::optional<emu::Network> network_;                         // in several domains
  std::map<std::pair<int, int>, ncclep::native::Rails> rails_;  // by rank and window
  std::deque<Memory> control_, rows_;
};

// In each of several domains there are as many ranks.
std::unique_ptr<Sequence> draw_rows(const Kind& kind, int ranks, int domains, const Starts& starts);
std::unique_ptr<Sequence> draw_low_latency(const Kind& kind, int ranks, int domains,
                                           const Starts& starts);
std::unique_ptr<Sequence> draw_probes(int ranks, int domains, const Starts& starts);

// No sequences, but how long the paths of kernels are on a rank of a group (paths.cpp).
void print_paths(int ranks, int domains);
