// How long the paths of kernels are on rank 0 of a group (machine/emulator.h), when everything that
// the other ranks send and put is there, and is the same for groups of any size: so what grows is
// what a rank does for each rank or domain, one after the other.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>

#include "machine/network.h"
#include "native/device/call_barrier.cuh"
#include "native/low_latency/operation.cuh"
#include "native/plan/plan.h"
#include "native/rows/progress.cuh"
#include "sequence.h"

using namespace ncclep::native;

namespace {

constexpr int kTokens = 8, kTopK = 2, kRowBytes = 16, kCtas = 2;
constexpr std::uint64_t kDeadlineNs = emu::kJump * 1000, kCall = 7;

class Rank {
 public:
  Rank(int ranks, int domains)
      : control_{ranks, ranks, kChunk, kTopK, domains},
        ll_{ranks, kTokens, kTopK, kRowBytes, 0, kRowBytes, domains},
        network_(ranks, ranks / domains, kNumRailSignals * domains) {
    emu::add_memory(&state_, sizeof(state_));
    emu::add_memory(&ll_state_, sizeof(ll_state_));
    const std::size_t control_bytes = RailLayout{control_}.end();
    for (const bool is_other : {false, true}) {
      control_windows_.emplace_back(control_bytes, 0);
      ll_windows_.emplace_back(ll_.num_bytes(), 0);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      network_.add_window(rank, control_windows_[rank > 0].data<char>(), control_bytes);
      network_.add_window(rank, ll_windows_[rank > 0].data<char>(), ll_.num_bytes());
    }
    for (int signal = 0; signal < kNumRailSignals * domains; ++signal) {
      network_.count(0, signal, 1 << 20);
    }
    for (int i = 0; i < kTokens; ++i) {
      topk_.data<std::int32_t>()[kTopK * i] = 0;
      topk_.data<std::int32_t>()[kTopK * i + 1] = ranks - 1;
    }
  }
  ~Rank() {
    emu::forget_memory(&state_);
    emu::forget_memory(&ll_state_);
  }

  KernelContext context() {
    KernelContext ctx{};
    ctx.control = control_;
    for (int local_rank = 0; local_rank < control_.local_ranks(); ++local_rank) {
      ctx.control_of.of_local_rank[local_rank] = control_windows_[local_rank > 0].data<char>();
    }
    ctx.state = &state_;
    ctx.mailbox = &mailbox_;
    ctx.deadline_ns = kDeadlineNs;
    return ctx;
  }
  LowLatencyContext low_latency() {
    LowLatencyContext ll{};
    ll.window = ll_;
    ll.state = &ll_state_;
    for (int local_rank = 0; local_rank < control_.local_ranks(); ++local_rank) {
      ll.window_of.of_local_rank[local_rank] = ll_windows_[local_rank > 0].data<char>();
    }
    return ll;
  }
  const Rails* rails(int window = 0) {
    rails_ = {{&network_, 0, window}};
    return control_.num_domains > 1 ? &rails_ : nullptr;
  }
  bool sends_here(int rank) const { return rank >= control_.num_ranks - kTokens; }

  // A token of each of the last ranks is here or, if they are in other domains, of their domains.
  void receive_rows() {
    for (int rank = 0; rank < control_.num_ranks; ++rank) {
      const std::uint32_t rows = sends_here(rank);
      *sent_word(low_latency(), 0, Turn::kDispatch, rank) = numbered(1, rows);
      *sent_word(low_latency(), 0, Turn::kCombine, rank) = numbered(1, 0);
    }
    for (int domain = 1; domain < control_.num_domains; ++domain) {
      char* message = ll_windows_[0].data<char>() + ll_.message(domain);
      *reinterpret_cast<std::uint64_t*>(message) = domain >= control_.num_domains - kTokens;
      reinterpret_cast<std::int32_t*>(message + 16)[1] = -1;
    }
  }

  void dispatch_low_latency() {
    receive_rows();
    LowLatencyDispatch job{true, true};
    job.x = rows_.data<char>();
    job.weights = weights_.data<float>();
    job.topk_idx = topk_.data<char>();
    job.num_tokens = kTokens;
    job.counts = counts_.data<std::int32_t>();
    low_latency_dispatch(context(), low_latency(), job, kCtas, 0, rails(1));
  }

  void combine_low_latency() {
    receive_rows();
    ll_state_.dispatches = 1;
    LowLatencyCombine job{true, true};
    job.y = ll_windows_[0].data<char>() + ll_.rows();
    job.out = rows_.data<char>();
    job.num_tokens = kTokens;
    job.dtype = ncclepFloat32;
    low_latency_combine(context(), low_latency(), job, kCtas, 0, rails(1));
  }

  void plan() {
    char* window = control_windows_[0].data<char>();
    auto* words = reinterpret_cast<std::uint64_t*>(window + control_.counts());
    const int columns = control_.num_local() + 1;
    for (int i = 0; i < 2 * control_.num_ranks * columns; ++i) words[i] = numbered(1, 0);
    PlanCount job{};
    job.topk_idx = topk_.data<char>();
    job.num_tokens = kTokens;
    job.top_k = kTopK;
    job.most_chunks = job.alignment = 1;
    job.ticket = 1;
    job.tokens_per_expert = plan_.data<std::int64_t>();
    job.routed_per_expert = job.tokens_per_expert + control_.num_local();
    job.num_dropped = job.routed_per_expert + control_.num_local();
    job.token_routes = TokenRoutes::in(routes_.data<std::int32_t>(), control_, kTokens);
    job.rail_routes = RailRoutes::in(rail_routes_.data<std::int32_t>(), control_, kTokens,
                                     num_chunks_of(kTokens));
    plan_count(context(), job, PlanScratch(scratch_.data<std::int32_t>(), control_, kCtas), kCtas,
               0, rails());
  }

  // What a warp does that watches all phases of all ranks.
  template <typename R>
  static void watch_all(KernelContext ctx, R) {
    Progress& progress = emu::shared<Progress>(-1);
    progress.clear();
    __syncthreads();
    const auto flag = [&](int source, int phase) {
      const char* flags = ctx.control_of[0] + ctx.control.staged();
      return reinterpret_cast<const std::uint64_t*>(flags) + source * kPhases + phase;
    };
    watch<R>(ctx, Phase::kDispatch, 1, [](int) { return kPhases; }, flag, progress);
  }
  void watch_phases() {
    char* window = control_windows_[0].data<char>();
    auto* flags = reinterpret_cast<std::uint64_t*>(window + control_.staged());
    for (int i = 0; i < control_.num_ranks * kPhases; ++i) flags[i] = 1;
    with_rails(rails(), [&](const auto& way) {
      emu::start(watch_all<std::decay_t<decltype(way)>>, 1, kWarpSize, 0, 0, context(), way);
    });
  }

  template <typename R>
  static void compare(KernelContext ctx, R rails) {
    compare_entries<R>(ctx, rails, Phase::kDispatch, 1, 1);
  }
  void compare_all_entries() {
    KernelContext ctx = context();
    ctx.call = kCall;
    char* window = control_windows_[0].data<char>();
    auto* of_domain = reinterpret_cast<std::uint64_t*>(window + RailLayout{control_}.entries());
    for (int rank = 0; rank < control_.num_ranks; ++rank) {
      *entry_word(ctx, 0, 1, rank) = entry_of(ctx, 1);
      if (rank < control_.num_domains) of_domain[control_.num_domains + rank] = entry_of(ctx, 1);
    }
    with_rails(rails(), [&](const auto& way) {
      emu::start(compare<std::decay_t<decltype(way)>>, 1, kWarpSize, 0, 0, ctx, way);
    });
  }

 private:
  const Control control_;
  const LowLatencyWindow ll_;
  emu::Network network_;
  State state_{};
  LowLatencyState ll_state_{};
  Mailbox mailbox_{};
  Rails rails_{};
  std::deque<Memory> control_windows_, ll_windows_;  // this rank's, and one for all others
  Memory rows_{kTokens * kRowBytes, 0}, weights_{4 * kTokens * kTopK, 0};
  Memory topk_{4 * kTokens * kTopK, 0}, counts_{4 * kMaxRanks, 0};
  Memory plan_{8 * 3, 0}, routes_{16 * kTokens, 0};
  Memory rail_routes_{std::size_t(4) * RailRoutes::size(control_, kTokens, num_chunks_of(kTokens)),
                      0};
  Memory scratch_{std::size_t(4) * PlanScratch::size(control_, kCtas), 0};
};

}  // namespace

void print_paths(int ranks, int domains) {
  emu::kMaxHeldBytes = 148 * 1024;  // as on a GPU
  const std::pair<const char*, void (Rank::*)()> kernels[] = {
      {"low-latency dispatch", &Rank::dispatch_low_latency},
      {"low-latency combine", &Rank::combine_low_latency},
      {"plan", &Rank::plan},
      {"watching", &Rank::watch_phases},
      {"comparing calls", &Rank::compare_all_entries},
  };
  for (const auto& [name, queue] : kernels) {
    Rank rank(ranks, domains);
    const emu::Path path = emu::measure([&, run = queue] { (rank.*run)(); });
    std::printf("%s: %ld steps, %ld fences\n", name, path.steps, path.fences);
  }
}
