// Random sequences of plans, dispatches and combines on the emulator, held against an oracle.
//
//   rounds RANKS SEED NUMBER     NUMBER sequences of RANKS ranks, from SEED on
//
// Ranks run through a sequence at their own pace: what they wait for is what the kernels make them
// wait for.  Ends with a line "OK ..." or "FAILED: ..." and an exit status.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "common/error.h"
#include "emulator.h"
#include "native/combine.h"
#include "native/dispatch.h"
#include "native/overflow.h"
#include "native/plan.h"
#include "native/split.h"
#include "routing.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;
using ncclep::join_text;

namespace {

constexpr int kSms = 8;  // that a kernel has at most

template <typename... Text>
void require(bool holds, const Text&... text) {
  if (!holds) emu::fail(join_text(text...));
}

// Memory with something behind it that nobody may write to.
class Memory {
 public:
  Memory(std::size_t num_bytes, int fill) : num_bytes_(num_bytes), bytes_(num_bytes + 2 * kEdge) {
    std::fill(bytes_.begin(), bytes_.end(), kCanary);
    std::memset(data<char>(), fill, num_bytes);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    const char* end = data<char>() + num_bytes_;
    for (const char* i = end; i < bytes_.data() + bytes_.size(); ++i) {
      require(*i == kCanary, "something was written behind ", num_bytes_, " bytes of memory");
    }
  }
  template <typename T>
  T* data() {
    const auto start = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>(bytes_.data() + (kEdge - start % kEdge));
  }

 private:
  static constexpr std::size_t kEdge = 64;
  static constexpr char kCanary = 0x5c;
  std::size_t num_bytes_;
  std::vector<char> bytes_;
};

constexpr int kGarbage = 0x7f;  // what memory is filled with that must be written before it is read

// --- payload -------------------------------------------------------------------------------------

// Payload; sums of it depend on their order.
float value(int step, int rank, int row, int i) {
  const unsigned int mixed = (step * 7919u + rank * 1009u + row * 131u + i * 17u) * 2654435761u;
  return (static_cast<int>(mixed >> 8) - (1 << 23)) / static_cast<float>(1 + mixed % 997);
}

// --- a rank --------------------------------------------------------------------------------------

// One rank, with a plan of each routing.
class Runner {
 public:
  Runner(const Rank& me, const Sizes& sizes, const std::vector<Routing>& routings)
      : me_(me), sizes_(sizes), routings_(routings), plans_(routings.size()) {}

  // Makes plan `number`; with too little room at first, now and then, as the host may guess.
  void plan(int number) {
    const Routing& routing = routings_[number];
    const int top_k = routing.top_k, num_tokens = routing.num_tokens[me_.rank];
    const int local = sizes_.local, sms = between(1, kSms);
    const bool is_static = routing.limit > 0;
    Plan& plan = plans_[number];
    plan.experts = routing.experts[me_.rank];
    plan.experts.push_back(0);  // so that there is an address
    plan.counts.emplace(8 * (2 * local + 1), kGarbage);
    plan.home.emplace(16 * num_tokens, kGarbage);
    Memory scratch(4 * PlanScratch::size(me_.control, kSms), kGarbage);
    Memory kept(4 * num_tokens * top_k, kGarbage);
    const PlanScratch parts(scratch.data<std::int32_t>(), me_.control, kSms);

    PlanCount job{};
    job.topk_idx = plan.experts.data();
    job.num_tokens = num_tokens;
    job.top_k = top_k;
    job.most_chunks = routing.most_chunks();
    job.alignment = routing.alignment;
    job.is_static = is_static;
    job.ticket = is_static ? 0 : ++ticket_;
    job.tokens_per_expert = plan.counts->data<std::int64_t>();
    job.routed_per_expert = job.tokens_per_expert + local;
    job.num_dropped = job.routed_per_expert + local;
    job.home = home(plan, num_tokens);
    std::int64_t most_pairs = sizes_.ranks * routing.most_tokens();
    std::int64_t most_picks = most_pairs * std::min(top_k, local);
    if (is_static) {
      Drop drop{};
      drop.topk_idx = job.topk_idx;
      drop.num_tokens = num_tokens;
      drop.top_k = top_k;
      drop.alignment = routing.alignment;
      drop.max_recv_rows = routing.limit;
      drop.kept = kept.data<std::int32_t>();
      drop.num_wanted = job.num_dropped;
      drop_what_does_not_fit(me_, drop, parts, sms, me_.rank);
      emu::synchronize(me_.rank);
      job.topk_idx = drop.kept;
      most_picks = std::min(most_picks, routing.limit);
      most_pairs = std::min(most_pairs, most_picks);
    }
    plan_count(me_, job, parts, sms, me_.rank);
    emu::synchronize(me_.rank);
    if (!is_static) {
      for (const std::uint64_t size : me_.mailbox->sizes) {
        require(size >> 32 == ticket_, "the mailbox is not this plan's");
      }
      require(static_cast<int>(me_.mailbox->sizes[0]) == routing.num_rows[me_.rank], "rows");
      most_pairs = static_cast<std::uint32_t>(me_.mailbox->sizes[1]);
      most_picks = static_cast<std::uint32_t>(me_.mailbox->sizes[2]);
      if (most_pairs > 0 && between(0, 2) == 0) {
        receive(plan, routing, most_pairs - 1, most_picks, parts, sms);
      }
    }
    receive(plan, routing, most_pairs, most_picks, parts, sms);
    for (int i = 0; i < local; ++i) {
      require(job.tokens_per_expert[i] == routing.padded[me_.rank][i] &&
                  job.routed_per_expert[i] == routing.routed[me_.rank][i],
              "plan: the block of expert ", i, " of rank ", me_.rank);
    }
    require(*job.num_dropped == routing.num_dropped[me_.rank], "plan: dropped picks");
  }

  void dispatch(int number, int step, int floats, bool has_weights, int phases) {
    const Routing& routing = routings_[number];
    Plan& plan = plans_[number];
    const int num_tokens = routing.num_tokens[me_.rank], top_k = routing.top_k;
    const std::int64_t num_rows = routing.room_of(me_.rank);
    Memory x(std::size_t{4} * num_tokens * floats, 0), w(4 * num_tokens * top_k, 0);
    Memory rows(4 * num_rows * floats, kGarbage), row_w(4 * num_rows, kGarbage);
    for (int i = 0; i < num_tokens * floats; ++i) {
      x.data<float>()[i] = value(step, me_.rank, i / floats, i % floats);
    }
    for (int i = 0; i < num_tokens * top_k; ++i) w.data<float>()[i] = weight(step, me_.rank, i);

    Dispatch job{};
    job.x = x.data<char>();
    job.w = w.data<float>();
    job.rows = rows.data<char>();
    job.row_w = row_w.data<float>();
    job.has_weights = has_weights;
    job.num_tokens = num_tokens;
    job.most_tokens = routing.most_chunks() * kChunk;
    job.top_k = top_k;
    job.row_bytes = 4 * floats;
    job.num_phases = phases;
    job.num_rows = num_rows;
    job.tokens_per_expert = plan.counts->data<std::int64_t>();
    job.routed_per_expert = job.tokens_per_expert + sizes_.local;
    job.token_ranks = home(plan, num_tokens).token_ranks;
    job.routes = plan.received;
    ncclep::native::dispatch(me_, job, between(min_ctas(1), kSms), me_.rank);
    emu::synchronize(me_.rank);

    std::vector<std::pair<int, int>> origin(num_rows, {-1, 0});  // rank and pick
    for (int source = 0; source < sizes_.ranks; ++source) {
      for (std::size_t pick = 0; pick < routing.slots[source].size(); ++pick) {
        const int slot = routing.slots[source][pick];
        const bool is_here = slot >= 0 && routing.experts[source][pick] / sizes_.local == me_.rank;
        if (is_here) origin[slot] = {source, static_cast<int>(pick)};
      }
    }
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const auto [source, pick] = origin[row];
      for (int i = 0; i < floats; ++i) {
        const float expected = source < 0 ? 0 : value(step, source, pick / top_k, i);
        require(rows.data<float>()[row * floats + i] == expected, "dispatch: row ", row,
                " of rank ", me_.rank, ", from rank ", source, ", at float ", i, " of ", floats);
      }
      const float expected = source < 0 ? 0 : weight(step, source, pick);
      require(!has_weights || row_w.data<float>()[row] == expected, "dispatch: weight ", row);
    }
  }

  void combine(int number, int step, int floats, bool has_weights, int sms) {
    const Routing& routing = routings_[number];
    Plan& plan = plans_[number];
    const int num_tokens = routing.num_tokens[me_.rank], top_k = routing.top_k;
    const std::int64_t num_rows = routing.room_of(me_.rank);
    Memory y(4 * num_rows * floats, kGarbage), w(4 * num_rows, kGarbage);
    Memory out(std::size_t{4} * num_tokens * floats, kGarbage);
    Memory home_w(4 * num_tokens * top_k, kGarbage);
    for (int row = 0; row < num_rows; ++row) {
      for (int i = 0; i < floats; ++i) {
        y.data<float>()[row * floats + i] = value(step, me_.rank, row, i);
      }
      w.data<float>()[row] = weight(step, me_.rank, row);
    }
    const bool has_senders = split_combine(sms, sizes_.ranks, top_k, 4 * floats).sending > 0;
    Memory sums(has_senders ? 4 * plan.received.max_pairs * floats : 0, kGarbage);

    Combine job{};
    job.y = y.data<char>();
    job.sums = sums.data<char>();
    job.w = w.data<float>();
    job.out = out.data<char>();
    job.home_w = home_w.data<float>();
    job.has_weights = has_weights;
    job.dtype = ncclep::DType::kFloat32;
    job.num_tokens = num_tokens;
    job.top_k = top_k;
    job.row_bytes = 4 * floats;
    job.home = home(plan, num_tokens);
    job.routes = plan.received;
    ncclep::native::combine(me_, job, sms, me_.rank);
    emu::synchronize(me_.rank);

    for (int token = 0; token < num_tokens; ++token) {
      // Picks with a row, by expert: so by rank, too.
      std::vector<std::pair<int, int>> picks;
      for (int pick = token * top_k; pick < (token + 1) * top_k; ++pick) {
        const int slot = routing.slots[me_.rank][pick];
        const int expert = routing.experts[me_.rank][pick];
        if (slot >= 0) picks.emplace_back(expert, slot);
        const float expected = slot < 0 ? 0 : weight(step, expert / sizes_.local, slot);
        require(!has_weights || home_w.data<float>()[pick] == expected, "combine: weight ", pick);
      }
      std::sort(picks.begin(), picks.end());
      for (int i = 0; i < floats; ++i) {
        float total = 0, part = 0;
        for (std::size_t p = 0; p < picks.size(); ++p) {
          const int rank = picks[p].first / sizes_.local;
          part += value(step, rank, picks[p].second, i);
          if (p + 1 < picks.size() && picks[p + 1].first / sizes_.local == rank) continue;
          total += part;
          part = 0;
        }
        require(out.data<float>()[static_cast<std::size_t>(token) * floats + i] == total,
                "combine: token ", token, " of rank ", me_.rank, " at float ", i, " of ", floats);
      }
    }
  }

 private:
  struct Plan {
    std::vector<int> experts;
    std::optional<Memory> counts, home, routes;
    ReceivedRoutes received{};
  };

  static float weight(int step, int rank, int i) { return value(step + 1'000'000, rank, i, 0); }

  static HomeRoutes home(Plan& plan, int num_tokens) {
    return HomeRoutes::in(plan.home->data<std::int32_t>(), num_tokens);
  }

  void receive(Plan& plan, const Routing& routing, std::int64_t pairs, std::int64_t picks,
               const PlanScratch& scratch, int sms) {
    const int chunks = routing.most_chunks(), ranks = sizes_.ranks;
    plan.routes.emplace(4 * ReceivedRoutes::size(ranks, chunks, pairs, picks), kGarbage);
    auto* memory = plan.routes->data<std::int32_t>();
    plan.received = ReceivedRoutes::in(memory, ranks, chunks, pairs, picks);
    plan_receive(me_, plan.received, scratch, sms, me_.rank);
    emu::synchronize(me_.rank);
  }

  Rank me_;
  const Sizes& sizes_;
  const std::vector<Routing>& routings_;
  std::vector<Plan> plans_;
  std::uint32_t ticket_ = 0;
};

// --- a sequence ----------------------------------------------------------------------------------

struct Step {
  enum { kPlan, kDispatch, kCombine } kind;
  int plan, floats, phases, sms;
  bool has_weights;
};

// SMs with which a combine has warps enough for all ranks.
int sms_of_combine(int ranks) { return between(min_ctas(ranks), kSms); }

void run_sequence(int ranks) {
  Sizes sizes{};
  sizes.ranks = ranks;
  sizes.local = between(1, 3);
  sizes.max_tokens = one_of({8, 40, 130, 300});
  sizes.max_top_k = std::min(sizes.experts(), between(1, 6));
  // Rows of a piece and less, and of several.
  sizes.max_floats = sizes.max_tokens > 200 ? one_of({4, 64, 260}) : one_of({64, 516, 1024, 1536});

  Control control{ranks, sizes.experts(), (sizes.max_tokens + kChunk - 1) / kChunk * kChunk,
                  sizes.max_top_k};
  Rank me{};
  me.control = control;
  me.dispatch_bytes = std::size_t{4} * sizes.max_floats * control.max_tokens;
  me.deadline_ns = 1;
  std::deque<Memory> controls, rows;
  std::deque<State> states(ranks);
  std::deque<Mailbox> mailboxes(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    me.control_of[rank] = controls.emplace_back(control.num_bytes(), 0).data<char>();
    me.rows_of[rank] = rows.emplace_back(me.dispatch_bytes * (2 + ranks), kGarbage).data<char>();
    std::memset(static_cast<void*>(&states[rank]), 0, sizeof(State));
    std::memset(static_cast<void*>(&mailboxes[rank]), 0, sizeof(Mailbox));
  }

  std::vector<Routing> routings;
  std::vector<Step> steps;
  for (int i = between(4, 12); i >= 0; --i) {
    Step step{};
    const int what = routings.empty() ? 0 : between(0, 9);
    step.kind = what < 2 ? Step::kPlan : what < 6 ? Step::kDispatch : Step::kCombine;
    if (step.kind == Step::kPlan) routings.push_back(draw_routing(sizes));
    const int last = static_cast<int>(routings.size()) - 1;
    step.plan = step.kind == Step::kPlan ? last : between(0, last);
    step.floats = std::min(sizes.max_floats, 4 * one_of({1, 3, 16, 65, 128, 129, 256, 384}));
    step.phases = between(1, kPhases);
    step.sms = sms_of_combine(ranks);
    step.has_weights = between(0, 1) == 1;
    steps.push_back(step);
  }
  emu::run(ranks, [&](int rank) {
    Rank mine = me;
    mine.rank = rank;
    mine.state = &states[rank];
    mine.mailbox = &mailboxes[rank];
    Runner runner(mine, sizes, routings);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[i];
      const int number = static_cast<int>(i);
      if (step.kind == Step::kPlan) runner.plan(step.plan);
      if (step.kind == Step::kDispatch) {
        runner.dispatch(step.plan, number, step.floats, step.has_weights, step.phases);
      }
      if (step.kind == Step::kCombine) {
        runner.combine(step.plan, number, step.floats, step.has_weights, step.sms);
      }
    }
  });
  for (const State& state : states) {
    require(state.failed == 0 && state.arrived == 0 && state.leaving == 0 && state.next == 0,
            "a kernel left its state as it was in the middle");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) emu::fail("usage: rounds RANKS SEED NUMBER");
  const int ranks = std::atoi(argv[1]), first = std::atoi(argv[2]), number = std::atoi(argv[3]);
  for (int seed = first; seed < first + number; ++seed) {
    std::printf("seed %d\n", seed);
    std::fflush(stdout);
    emu::seed(seed * 16 + ranks);
    run_sequence(ranks);
  }
  std::printf("OK: %d sequences of %d ranks from seed %d on\n", number, ranks, first);
}
