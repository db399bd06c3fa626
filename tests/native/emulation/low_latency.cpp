#include "low_latency.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "native/device/refusal.h"
#include "native/low_latency/protocol.h"
#include "runner.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;

namespace {

// Payload; sums of it depend on their order.
float value(int round, int rank, int row, int i) {
  const unsigned int mixed = (round * 6007u + rank * 1013u + row * 151u + i * 29u) * 2654435761u;
  return (static_cast<int>(mixed >> 8) - (1 << 23)) / static_cast<float>((1 + mixed % 997) << 14);
}

float weight(int round, int rank, int assignment) {
  return value(round + 1'000'000, rank, assignment, 0);
}
char scale(int round, int rank, int token, int i) {
  return static_cast<char>(round * 7 + rank * 31 + token * 3 + i);
}

constexpr std::int32_t kNowhere = 0x7f7f7f7f;
const Numbers kWeights(ncclep::DType::kFloat32);

// What the experts of all ranks do with a dispatch.
enum class Experts { kNothing, kRows, kOneByOne };

struct Round {
  Routing routing;  // `named` and `experts` have K columns, those of the window
  Experts experts;
};

// A dispatch or a combine, or half of it, of one of the objects.
struct Step {
  int object, round;
  bool is_combine, sends, completes;
};

// A (source rank, token) on the rank where it has experts, and its assignments there, by expert.
struct Pair {
  int source, token, place;
  std::vector<std::pair<int, int>> assignments;  // local expert, k
};

// An object of all ranks: windows, states and what it is asked to do.
class Object {
 public:
  Object(const World& world, const Sizes& sizes, int number)
      : sizes_(sizes),
        number_(number),
        dtype_(
            one_of({ncclep::DType::kFloat32, ncclep::DType::kBFloat16, ncclep::DType::kFloat16})),
        states_(sizes.ranks) {
    const int row_bytes = 16 * one_of({1, 3, 65, 129}), scale_bytes = 16 * one_of({0, 0, 1, 40});
    const int sum_bytes = between(0, 3) == 0 ? 16 * one_of({1, 70}) : row_bytes;
    shared_.window = {sizes.ranks, sizes.max_tokens, sizes.max_top_k,
                      row_bytes,   scale_bytes,      sum_bytes};
    for (int rank = 0; rank < sizes.ranks; ++rank) {
      Memory& window = windows_.emplace_back(shared_.window.num_bytes(), 0);
      shared_.window_of[rank] = window.data<char>();
      std::memset(static_cast<void*>(&states_[rank]), 0, sizeof(LowLatencyState));
      states_[rank].dispatches = states_[rank].combines = sizes.starts.low_latency;
      emu::add_memory(&states_[rank], sizeof(LowLatencyState));
      ranks_.emplace_back(std::make_unique<OfRank>(world.of(rank), shared_.window));
    }
  }

  ~Object() {
    for (LowLatencyState& state : states_) emu::forget_memory(&state);
  }

  void draw_round() {
    Round round{draw_routing(sizes_, one_of({0, 0, 10})), Experts::kRows};
    Routing& routing = round.routing;
    const int top_k = shared_.window.top_k;
    for (int rank = 0; rank < sizes_.ranks; ++rank) {
      const auto named = std::exchange(routing.named[rank], {});
      const auto experts = std::exchange(routing.experts[rank], {});
      for (int i = 0; i < routing.num_tokens[rank] * top_k; ++i) {
        const int from = i / top_k * routing.top_k + i % top_k;
        const bool is_there = i % top_k < routing.top_k;
        routing.named[rank].push_back(is_there ? named[from] : -1);
        routing.experts[rank].push_back(is_there ? experts[from] : -1);
      }
    }
    round.experts = one_of({Experts::kNothing, Experts::kRows, Experts::kOneByOne});
    if (shared_.window.row_bytes != shared_.window.sum_bytes && round.experts == Experts::kNothing)
      round.experts = Experts::kRows;
    rounds_.push_back(std::move(round));
  }
  int num_rounds() const { return static_cast<int>(rounds_.size()); }

  void set_deadline(int rank, std::uint64_t deadline_ns) {
    ranks_[rank]->me.deadline_ns = deadline_ns;
  }

  void run(int rank, const Step& step) {
    step.is_combine ? combine(rank, step) : dispatch(rank, step);
  }

  std::vector<std::vector<char>> windows_but_of(int rank) {
    std::vector<std::vector<char>> copies;
    for (int other = 0; other < sizes_.ranks; ++other) {
      if (other != rank) copies.push_back(windows_[other].copy());
    }
    return copies;
  }

  void require_at_rest() {
    for (const LowLatencyState& state : states_) {
      require(state.sent == 0 && state.dispatches == state.combines,
              "a kernel left its state as it was in the middle");
    }
  }

 private:
  // What a rank has in its hands between two calls.
  struct OfRank {
    OfRank(const KernelContext& rank, const LowLatencyWindow& window)
        : me(rank), counts(4 * window.num_ranks, kGarbage) {}
    KernelContext me;
    Memory counts;
    std::optional<Memory> x, scales, w, topk, y, rows_of, out;
    std::uint32_t bad_ranks = 0;
  };

  LowLatencyContext of(int rank) {
    LowLatencyContext ll = shared_;
    ll.state = &states_[rank];
    return ll;
  }

  std::vector<Pair> pairs(const Round& round, int rank) const {
    std::vector<Pair> found;
    for (int source = 0; source < sizes_.ranks; ++source) {
      int place = 0;
      for (int token = 0; token < round.routing.num_tokens[source]; ++token) {
        Pair pair{source, token, place, {}};
        for (int k = 0; k < shared_.window.top_k; ++k) {
          const int expert = round.routing.experts[source][token * shared_.window.top_k + k];
          if (expert >= 0 && expert / sizes_.local == rank) {
            pair.assignments.emplace_back(expert % sizes_.local, k);
          }
        }
        if (pair.assignments.empty()) continue;
        std::sort(pair.assignments.begin(), pair.assignments.end());
        found.push_back(pair);
        ++place;
      }
    }
    return found;
  }

  int row_of(const Pair& pair) const { return pair.source * sizes_.max_tokens + pair.place; }
  // Tells rounds of two objects apart.
  int salt(int round) const { return 2 * round + number_; }

  void dispatch(int rank, const Step& step) {
    const LowLatencyWindow& window = shared_.window;
    const Round& round = rounds_[step.round];
    const Routing& routing = round.routing;
    const int num_tokens = routing.num_tokens[rank], top_k = window.top_k;
    const Numbers numbers(dtype_);
    const int hidden = window.row_bytes / numbers.size();
    OfRank& mine = *ranks_[rank];
    if (step.sends) {
      mine.x.emplace(std::size_t{1} * num_tokens * window.row_bytes, 0);
      mine.scales.emplace(std::size_t{1} * num_tokens * window.scale_bytes, 0);
      mine.w.emplace(4 * num_tokens * top_k, 0);
      mine.topk.emplace((routing.is_int64 ? 8 : 4) * num_tokens * top_k, 0);
      for (int i = 0; i < num_tokens * hidden; ++i) {
        numbers.put(*mine.x, i, value(salt(step.round), rank, i / hidden, i % hidden));
      }
      const int num_scales = window.scale_bytes;
      for (int i = 0; i < num_tokens * num_scales; ++i) {
        mine.scales->data<char>()[i] =
            scale(salt(step.round), rank, i / num_scales, i % num_scales);
      }
      for (int i = 0; i < num_tokens * top_k; ++i) {
        kWeights.put(*mine.w, i, weight(salt(step.round), rank, i));
        const std::int64_t named = routing.named[rank][i];
        if (routing.is_int64) mine.topk->data<std::int64_t>()[i] = named;
        if (!routing.is_int64) mine.topk->data<std::int32_t>()[i] = static_cast<int>(named);
      }
    }
    LowLatencyDispatch job{};
    job.sends = step.sends;
    job.completes = step.completes;
    job.x = mine.x->data<char>();
    job.scales = mine.scales->data<char>();
    job.weights = mine.w->data<float>();
    job.topk_idx = mine.topk->data<char>();
    job.is_int64 = routing.is_int64;
    job.num_tokens = num_tokens;
    job.counts = mine.counts.data<std::int32_t>();
    low_latency_dispatch(mine.me, of(rank), job, between(1, kSms), rank);
    emu::synchronize(rank);
    if (step.completes) check_dispatch(rank, step.round);
  }

  void check_dispatch(int rank, int number) {
    const LowLatencyWindow& window = shared_.window;
    const Round& round = rounds_[number];
    const Numbers numbers(dtype_);
    const int hidden = window.row_bytes / numbers.size(), top_k = window.top_k;
    OfRank& mine = *ranks_[rank];
    // As a kernel on this rank would see it that comes next.
    Memory seen(window.num_bytes(), 0);
    char* start = seen.data<char>();
    emu::load(start, windows_[rank].data<char>(), window.num_bytes(), emu::seen_by(rank));
    const auto* counts = mine.counts.data<std::int32_t>();
    const auto* experts = reinterpret_cast<const std::int32_t*>(start + window.experts());
    const auto* weights = reinterpret_cast<const std::uint32_t*>(start + window.weights());
    const bool has_failed = mine.me.state->failed != 0;
    std::vector<std::int32_t> expected(window.places() * top_k, -1);
    std::vector<int> expected_counts(sizes_.ranks, 0);
    if (has_failed) {
      require(std::all_of(weights, weights + window.places() * top_k,
                          [](std::uint32_t bits) { return bits == ~0u; }),
              "ll dispatch: weights of rank ", rank, ", whose group has failed: not all NaN");
    } else {
      for (const Pair& pair : pairs(round, rank)) {
        ++expected_counts[pair.source];
        const int row = row_of(pair);
        for (const auto& [expert, k] : pair.assignments) {
          expected[row * top_k + k] = expert;
          const float w = weight(salt(number), pair.source, pair.token * top_k + k);
          require(weights[row * top_k + k] == kWeights.bits(w), "ll dispatch: weight of row ", row,
                  " of rank ", rank);
        }
        const char* scales = start + window.scales() + std::size_t{1} * row * window.scale_bytes;
        for (int i = 0; i < window.scale_bytes; ++i) {
          require(scales[i] == scale(salt(number), pair.source, pair.token, i),
                  "ll dispatch: scales of row ", row, " of rank ", rank);
        }
        const char* at = start + window.rows() + static_cast<std::size_t>(row) * window.row_bytes;
        for (int i = 0; i < hidden; ++i) {
          const std::uint32_t bits = numbers.bits(value(salt(number), pair.source, pair.token, i));
          require(std::memcmp(at + i * numbers.size(), &bits, numbers.size()) == 0,
                  "ll dispatch: row ", row, " of rank ", rank, ", token ", pair.token, " of rank ",
                  pair.source, ", at number ", i, " of ", hidden);
        }
      }
      mine.bad_ranks |= round.routing.bad_ranks;
    }
    require(std::equal(expected_counts.begin(), expected_counts.end(), counts),
            "ll dispatch: counts of rank ", rank);
    require(std::equal(expected.begin(), expected.end(), experts), "ll dispatch: experts of rank ",
            rank);
    // Those of the world's other object are there, too.
    require((mine.me.mailbox->bad_low_latency & mine.bad_ranks) == mine.bad_ranks,
            "ll dispatch: bad ranks");
    require(has_failed || mine.bad_ranks != 0 || number_ != 0 ||
                mine.me.mailbox->bad_low_latency == 0 || has_other_,
            "ll dispatch: bad ranks where there are none");
  }

  // A number of what the experts of `rank` made of a pair, assignment by assignment.
  float made(int number, int rank, const Pair& pair, int assignment, int i) const {
    return value(salt(number) + 500, rank, row_of(pair) * 40 + assignment, i);
  }

  // The part of a token that `rank` has made, in fp32; rounded if it crosses.
  float part_of(int number, int rank, const Pair& pair, int i, bool is_own) const {
    const Numbers numbers(dtype_);
    const Round& round = rounds_[number];
    if (round.experts == Experts::kNothing) {
      return numbers.round(value(salt(number), pair.source, pair.token, i));
    }
    if (round.experts == Experts::kRows) return numbers.round(made(number, rank, pair, 0, i));
    float part = 0;
    for (std::size_t assignment = 0; assignment < pair.assignments.size(); ++assignment) {
      part += numbers.round(made(number, rank, pair, static_cast<int>(assignment), i));
    }
    return is_own ? part : numbers.round(part);
  }

  void combine(int rank, const Step& step) {
    const LowLatencyWindow& window = shared_.window;
    const Round& round = rounds_[step.round];
    const Numbers numbers(dtype_);
    const int hidden = window.sum_bytes / numbers.size(), top_k = window.top_k;
    const int num_tokens = round.routing.num_tokens[rank];
    OfRank& mine = *ranks_[rank];
    if (step.sends) {
      const std::vector<Pair> here = pairs(round, rank);
      std::size_t num_rows = window.places();
      mine.rows_of.emplace(4 * window.places() * top_k, kGarbage);
      auto* rows_of = mine.rows_of->data<std::int32_t>();
      if (round.experts == Experts::kOneByOne) {
        num_rows = 0;
        for (const Pair& pair : here) num_rows += pair.assignments.size();
      }
      mine.y.emplace(num_rows * window.sum_bytes, kGarbage);
      // The rows of later pairs come first.
      std::size_t next = num_rows;
      for (const Pair& pair : here) {
        for (int assignment = 0; assignment < top_k; ++assignment) {
          std::size_t row = row_of(pair);
          if (round.experts == Experts::kOneByOne) {
            const bool is_one = assignment < static_cast<int>(pair.assignments.size());
            rows_of[row * top_k + assignment] = is_one ? static_cast<int>(--next) : -1;
            if (!is_one) continue;
            row = next;
          } else if (assignment > 0) {
            continue;
          }
          for (int i = 0; i < hidden; ++i) {
            numbers.put(*mine.y, row * hidden + i, made(step.round, rank, pair, assignment, i));
          }
        }
      }
      mine.out.emplace(std::size_t{1} * num_tokens * window.sum_bytes, kGarbage);
    }
    LowLatencyCombine job{};
    job.sends = step.sends;
    job.completes = step.completes;
    job.y = round.experts == Experts::kNothing ? windows_[rank].data<char>() + window.rows()
                                               : mine.y->data<char>();
    job.rows_of =
        round.experts == Experts::kOneByOne ? mine.rows_of->data<std::int32_t>() : nullptr;
    job.num_rows = static_cast<int>(mine.y->num_bytes() / window.sum_bytes);
    job.out = mine.out->data<char>();
    job.num_tokens = num_tokens;
    job.dtype = dtype_;
    const bool had_failed = mine.me.state->failed != 0;
    low_latency_combine(mine.me, of(rank), job, between(1, kSms), rank);
    emu::synchronize(rank);
    if (!step.completes) return;
    if (had_failed) {
      require(mine.out->is(0xff), "ll combine: tokens of rank ", rank,
              ", whose group has failed: not all NaN");
      return;
    }
    check_combine(rank, step.round, mine.me.state->failed != 0);
  }

  // Where the group has failed in this very call a number may be NaN, and is right otherwise.
  void check_combine(int rank, int number, bool may_be_nan) {
    const Round& round = rounds_[number];
    const Numbers numbers(dtype_);
    const int hidden = shared_.window.sum_bytes / numbers.size();
    const int num_tokens = round.routing.num_tokens[rank];
    std::vector<float> total(num_tokens * hidden, 0);
    for (int part = 0; part < sizes_.ranks; ++part) {
      for (const Pair& pair : pairs(round, part)) {
        if (pair.source != rank) continue;
        for (int i = 0; i < hidden; ++i) {
          total[pair.token * hidden + i] += part_of(number, part, pair, i, part == rank);
        }
      }
    }
    Memory& out = *ranks_[rank]->out;
    const std::uint32_t nan = numbers.size() == 4 ? ~0u : 0xffff;
    for (int i = 0; i < num_tokens * hidden; ++i) {
      const std::uint32_t bits = numbers.get(out, i);
      require((may_be_nan && bits == nan) || bits == numbers.bits(total[i]), "ll combine: token ",
              i / hidden, " of rank ", rank, " at number ", i % hidden, " of ", hidden);
    }
  }

 public:
  bool has_other_ = false;

 private:
  const Sizes& sizes_;
  const int number_;
  const ncclep::DType dtype_;
  LowLatencyContext shared_{};
  std::deque<Memory> windows_;
  std::deque<LowLatencyState> states_;
  std::vector<std::unique_ptr<OfRank>> ranks_;
  std::vector<Round> rounds_;
};

// Operations of all objects, each object's in order; halves of one may have another's in between.
std::vector<Step> draw_steps(std::deque<Object>& objects, int rounds) {
  std::vector<std::vector<Step>> of_object(objects.size());
  for (std::size_t object = 0; object < objects.size(); ++object) {
    for (int round = 0; round < rounds; ++round) {
      objects[object].draw_round();
      for (const bool is_combine : {false, true}) {
        const int number = static_cast<int>(object);
        if (between(0, 2) > 0) {
          of_object[object].push_back({number, round, is_combine, true, true});
        } else {
          of_object[object].push_back({number, round, is_combine, true, false});
          of_object[object].push_back({number, round, is_combine, false, true});
        }
      }
    }
  }
  std::vector<Step> steps;
  std::vector<std::size_t> next(objects.size(), 0);
  for (;;) {
    std::vector<std::size_t> left;
    for (std::size_t object = 0; object < objects.size(); ++object) {
      if (next[object] < of_object[object].size()) left.push_back(object);
    }
    if (left.empty()) return steps;
    const std::size_t object = left[emu::draw(left.size())];
    steps.push_back(of_object[object][next[object]++]);
  }
}

struct Stopped {};

enum class Failure { kNone, kStops, kComesLate, kRefuses, kOutOfTurn };

void run_sequence(const Sizes& sizes, Failure failure) {
  World world(sizes);
  std::deque<Object> objects;
  const int num_objects = failure == Failure::kNone ? between(1, 2) : 1;
  for (int i = 0; i < num_objects; ++i) objects.emplace_back(world, sizes, i);
  for (Object& object : objects) object.has_other_ = num_objects > 1;
  const std::vector<Step> steps = draw_steps(objects, between(2, 5));
  const int last = static_cast<int>(steps.size()) - 1;
  const int victim = between(0, sizes.ranks - 1);
  // Nobody who is alone gets past the last step.
  int stops_at = failure == Failure::kNone ? last + 1 : between(0, last - 1);
  if (failure == Failure::kOutOfTurn) {
    // In the middle of an operation its other half is the next in turn, as far as a device knows.
    while (stops_at < last && !(steps[stops_at].sends && steps[stops_at].completes)) ++stops_at;
    if (stops_at == last) {
      failure = Failure::kStops;
      stops_at = between(0, last - 1);
    }
  }
  int num_over = 0;
  emu::run(sizes.ranks, [&](int rank) {
    try {
      for (int i = 0; i <= last; ++i) {
        Step step = steps[i];
        if (rank == victim && i == stops_at) {
          if (failure == Failure::kRefuses) {
            refuse(world.of(rank), Phase::kLowLatencyDispatch, rank);
            emu::synchronize(rank);
          }
          if (failure == Failure::kStops || failure == Failure::kRefuses) throw Stopped();
          while (failure == Failure::kComesLate && num_over < sizes.ranks - 1) emu::yield();
          if (failure == Failure::kOutOfTurn) step.is_combine = !step.is_combine;
        }
        objects[step.object].run(rank, step);
        require(failure != Failure::kOutOfTurn || rank != victim || i != stops_at ||
                    world.state(rank).failed != 0,
                "failure: an operation out of turn is made");
      }
    } catch (const Stopped&) {
    }
    ++num_over;
  });
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    const auto& mailbox = world.mailbox(rank);
    const auto reason = static_cast<Reason>(mailbox.failed_reason);
    if (failure == Failure::kNone) {
      require(world.state(rank).failed == 0, "a wait was in vain: of rank ", rank, " for rank ",
              mailbox.failed_peer, ", in phase ", mailbox.failed_phase);
      continue;
    }
    if (rank == victim) {
      if (failure == Failure::kOutOfTurn) {
        require(reason == Reason::kOutOfTurn, "failure: rank ", rank, " does not say out of turn");
      }
      continue;
    }
    require(world.state(rank).failed != 0, "failure: rank ", rank, " has waited for nobody");
    if (failure == Failure::kRefuses) {
      require(reason == Reason::kRefused || reason == Reason::kLate, "failure: rank ", rank,
              " says another reason");
    } else {
      require(reason == Reason::kLate, "failure: rank ", rank, " does not say that it waited");
    }
    const auto before = objects[0].windows_but_of(rank);
    emu::run(sizes.ranks, [&](int other) {
      if (other != rank) return;
      for (const Step& step : steps) objects[step.object].run(rank, step);
    });
    require(objects[0].windows_but_of(rank) == before, "failure: rank ", rank,
            " writes into other ranks' windows afterwards");
  }
  if (failure == Failure::kNone) {
    for (Object& object : objects) object.require_at_rest();
  }
}

}  // namespace

bool is_low_latency(const std::string& kind) { return kind.rfind("ll", 0) == 0; }

void run_low_latency(const std::string& kind, int ranks, const Starts& starts) {
  Sizes sizes{};
  sizes.ranks = ranks;
  sizes.starts = starts;
  sizes.local = between(0, 4) == 0 ? 35 : between(1, 3);
  sizes.max_tokens = one_of({1, 5, 33, kLowLatencyTokens});
  sizes.max_top_k = std::min(sizes.experts(), one_of({1, 3, 8, 32}));
  sizes.max_row_bytes = 16;
  run_sequence(sizes, kind == "ll" ? Failure::kNone
                                   : one_of({Failure::kStops, Failure::kComesLate,
                                             Failure::kRefuses, Failure::kOutOfTurn}));
}
