// Sequences of low-latency dispatches and combines, of one or two objects.  Halves of an object's
// operation may have operations of the other object in between.
#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "native/low_latency/protocol.h"
#include "sequence.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;

namespace {

// What the experts of all ranks make of a dispatch: they return the rows as they lie in the window,
// one row for each received one, or one for each assignment, which the kernel adds up.
enum class Experts { kNothing, kPlaces, kAssignments };

struct Round {
  Routing routing;
  Experts experts;
};

// A dispatch or a combine of one of the objects, or half of it.
struct Step {
  int object, round;
  bool is_combine, sends, completes;
};

// What a rank has between two calls.
struct OfRank {
  std::optional<Memory> counts, x, scales, w, topk, y, rows_of, out;
};

float scale(int salt, int rank, int token, int i) { return value(salt + 1000, rank, token, i); }

// An object of all ranks: windows, states, and what goes through it.
struct Object {
  Object(const Sizes& sizes, int number, int num_rounds)
      : number(number), numbers(Numbers::of_any_dtype()), states(sizes.ranks), ranks(sizes.ranks) {
    const int row_bytes = 16 * one_of({1, 3, 65, 129});
    const int sum_bytes = between(0, 3) == 0 ? 16 * one_of({1, 70}) : row_bytes;
    window = {
        sizes.ranks, sizes.max_tokens, sizes.max_top_k, row_bytes, 16 * one_of({0, 0, 1, 3, 14}),
        sum_bytes,   sizes.domains};
    for (LowLatencyState& state : states) {
      windows.emplace_back(window.num_bytes(), 0);
      std::memset(static_cast<void*>(&state), 0, sizeof(LowLatencyState));
      state.dispatches = state.combines = sizes.starts.low_latency;
      emu::add_memory(&state, sizeof(LowLatencyState));
    }
    for (int round = 0; round < num_rounds; ++round) {
      const bool can_return_rows = row_bytes == sum_bytes;
      rounds.push_back({draw_routing(sizes, one_of({0, 0, 10, 200}), window.top_k),
                        one_of({can_return_rows ? Experts::kNothing : Experts::kPlaces,
                                Experts::kPlaces, Experts::kAssignments})});
    }
  }
  ~Object() {
    for (LowLatencyState& state : states) emu::forget_memory(&state);
  }

  LowLatencyContext context(int rank) {
    LowLatencyContext ll{};
    ll.window = window;
    ll.state = &states[rank];
    const int locals = window.num_ranks / window.num_domains;
    ll.window_of.first_rank = rank / locals * locals;
    for (int local_rank = 0; local_rank < locals; ++local_rank) {
      ll.window_of.of_local_rank[local_rank] =
          windows[ll.window_of.first_rank + local_rank].data<char>();
    }
    return ll;
  }
  int row_of(const Pair& pair) const { return pair.source * window.max_tokens + pair.index; }
  int num_tokens(int rank, int round) const { return rounds[round].routing.num_tokens[rank]; }
  // Tells rounds of two objects apart.
  int salt(int round) const { return 2 * round + number; }
  // Rows of a pair that the experts return.
  int num_returned(int round, const Pair& pair) const {
    const bool is_one = rounds[round].experts != Experts::kAssignments;
    return is_one ? 1 : static_cast<int>(pair.assignments.size());
  }
  float returned(int round, int rank, const Pair& pair, int row, int i) const {
    return rounds[round].experts == Experts::kNothing
               ? value(salt(round), pair.source, pair.token, i)
               : value(salt(round) + 500, rank, row_of(pair) * 40 + row, i);
  }

  const int number;
  const Numbers numbers;
  LowLatencyWindow window;
  std::deque<Memory> windows;
  std::deque<LowLatencyState> states;
  std::vector<Round> rounds;
  std::deque<OfRank> ranks;
};

class LowLatencySteps : public Sequence {
 public:
  LowLatencySteps(const Sizes& sizes, int num_objects) : Sequence(sizes), bad_ranks_(sizes.ranks) {
    const int num_rounds = sizes.ranks > 32 ? 2 : between(2, 5);  // what many ranks add shows soon
    for (int i = 0; i < num_objects; ++i) {
      Object& object = objects_.emplace_back(this->sizes, i, num_rounds);
      for (int rank = 0; rank < sizes.ranks; ++rank) add_to_network(rank, object.windows[rank]);
    }
    draw_steps(num_rounds);
  }

  int num_steps() const override { return static_cast<int>(steps_.size()); }

  void run(int rank, int number) override {
    const Step& step = steps_[number];
    const bool is_combine = step.is_combine != (rank == differing);
    is_combine ? combine(rank, step) : dispatch(rank, step);
  }

  Bytes windows_but_of(int rank) override {
    Bytes copies = Sequence::windows_but_of(rank);
    for (Object& object : objects_) {
      for (int other = 0; other < sizes.ranks; ++other) {
        if (other != rank) copies.push_back(object.windows[other].copy());
      }
    }
    return copies;
  }

  void require_at_rest() override {
    Sequence::require_at_rest();
    for (const Object& object : objects_) {
      for (const LowLatencyState& state : object.states) {
        require(state.sent == 0 && state.dispatches == state.combines,
                "a kernel left its state as it was in the middle");
      }
    }
  }

  // --- failures ---

  int last_kernel() const override { return num_steps() - 2; }
  // From the next step on, which must be whole: to a device the other half of an operation is the
  // next in turn.
  bool can_differ(int step) const override {
    return step + 1 < num_steps() && steps_[step + 1].sends && steps_[step + 1].completes;
  }
  // A rank that comes late finds the words of others that have given up between their halves.
  bool may_go_on(Failing how, int, bool is_victim) const override {
    return how == Failing::kComesLate && is_victim;
  }

  void check_failure(int rank, int number, Failing how, int victim) override {
    const Mailbox& mailbox = mailboxes[rank];
    const auto reason = static_cast<Reason>(mailbox.failed_reason);
    if (how == Failing::kDiffers && rank == victim) {
      require(reason == Reason::kOutOfTurn, "failure: rank ", rank, " does not say out of turn");
      return;
    }
    const auto phase = static_cast<Phase>(mailbox.failed_phase);
    require(phase == (steps_[number].is_combine ? Phase::kLowLatencyCombine
                                                : Phase::kLowLatencyDispatch),
            "failure: rank ", rank, " names phase ", mailbox.failed_phase, " in step ", number);
    require(mailbox.failed_epoch == sizes.starts.low_latency + steps_[number].round + 1,
            "failure: rank ", rank, " names operation ", mailbox.failed_epoch);
    require(reason == Reason::kLate || (how == Failing::kRefuses && reason == Reason::kRefused),
            "failure: rank ", rank, " does not say that it waited");
  }

 private:
  // The operations of all objects, each object's in order.
  void draw_steps(int num_rounds) {
    std::vector<int> next(objects_.size(), 0);  // operation of each object
    std::vector<char> is_half(objects_.size(), false);
    std::vector<int> left(objects_.size());
    std::iota(left.begin(), left.end(), 0);
    while (!left.empty()) {
      const int object = left[emu::draw(left.size())];
      const int round = next[object] / 2;
      const bool is_combine = next[object] % 2 == 1, has_sent = is_half[object];
      const bool completes = has_sent || between(0, 2) > 0;
      steps_.push_back({object, round, is_combine, !has_sent, completes});
      is_half[object] = !completes;
      if (completes && ++next[object] == 2 * num_rounds) {
        left.erase(std::find(left.begin(), left.end(), object));
      }
    }
  }

  void dispatch(int rank, const Step& step) {
    Object& object = objects_[step.object];
    const LowLatencyWindow& window = object.window;
    const Routing& routing = object.rounds[step.round].routing;
    const int num_tokens = object.num_tokens(rank, step.round), salt = object.salt(step.round);
    const int hidden = window.row_bytes / object.numbers.size();
    OfRank& mine = object.ranks[rank];
    if (step.sends) {
      mine.counts.emplace(4 * sizes.ranks, kGarbage);
      mine.x.emplace(std::size_t{1} * num_tokens * window.row_bytes, 0);
      mine.scales.emplace(std::size_t{1} * num_tokens * window.scale_bytes, 0);
      mine.w.emplace(4 * num_tokens * window.top_k, 0);
      const int num_scales = window.scale_bytes / 4;
      kWeights.put(mine.scales->data<char>(), num_tokens * num_scales,
                   [&](int i) { return scale(salt, rank, i / num_scales, i % num_scales); });
      object.numbers.put(mine.x->data<char>(), num_tokens * hidden,
                         [&](int i) { return value(salt, rank, i / hidden, i % hidden); });
      kWeights.put(mine.w->data<char>(), num_tokens * window.top_k,
                   [&](int i) { return weight(salt, rank, i); });
      mine.topk.emplace(routing.index_bytes() * num_tokens * window.top_k, 0);
      routing.put_indices(rank, mine.topk->data<char>());
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
    job.counts = mine.counts->data<std::int32_t>();
    const KernelContext ctx = context(rank);
    launch(rank, [&] {
      low_latency_dispatch(ctx, object.context(rank), job, between(1, kSms), rank,
                           rails(rank, 2 + object.number));
    });
    if (step.completes) check_dispatch(rank, object, step.round);
  }

  // What rank `rank` has in the rows of its window after a dispatch.
  struct Headers {
    std::vector<std::int32_t> experts;
    std::vector<float> weights;
  };
  Headers headers_of(int rank, const Object& object, int number) const {
    const std::size_t size = object.window.num_rows() * object.window.top_k;
    Headers headers{std::vector<std::int32_t>(size, -1), std::vector<float>(size, 0)};
    for (const Pair& pair : object.rounds[number].routing.pairs[rank]) {
      for (const Assignment& assignment : pair.assignments) {
        const int top_k = object.window.top_k;
        const std::size_t at = std::size_t(object.row_of(pair)) * top_k + assignment.index % top_k;
        headers.experts[at] = assignment.expert;
        headers.weights[at] = weight(object.salt(number), pair.source, assignment.index);
      }
    }
    return headers;
  }

  void check_dispatch(int rank, Object& object, int number) {
    const LowLatencyWindow& window = object.window;
    const Routing& routing = object.rounds[number].routing;
    const int salt = object.salt(number), top_k = window.top_k;
    // As the next kernel on this rank would see it.
    Memory seen(window.num_bytes(), 0);
    char* start = seen.data<char>();
    emu::load(start, object.windows[rank].data<char>(), window.num_bytes(), emu::seen_by(rank));
    const auto* counts = object.ranks[rank].counts->data<std::int32_t>();
    const auto* experts = reinterpret_cast<const std::int32_t*>(start + window.experts());
    std::vector<int> expected_counts(sizes.ranks, 0);
    for (const Pair& pair : routing.pairs[rank]) {
      if (has_failed(rank)) continue;
      const std::size_t row = object.row_of(pair);
      ++expected_counts[pair.source];
      object.numbers.expect(
          start + window.rows() + row * window.row_bytes, window.row_bytes / object.numbers.size(),
          [&](int i) { return value(salt, pair.source, pair.token, i); }, "ll dispatch: row ", row,
          " of rank ", rank, ", token ", pair.token, " of rank ", pair.source);
      kWeights.expect(
          start + window.scales() + row * window.scale_bytes, window.scale_bytes / 4,
          [&](int i) { return scale(salt, pair.source, pair.token, i); },
          "ll dispatch: scales of row ", row, " of rank ", rank, ", token ", pair.token,
          " of rank ", pair.source);
    }
    require(std::equal(expected_counts.begin(), expected_counts.end(), counts),
            "ll dispatch: counts of rank ", rank);
    // Where the group has failed there is nothing, or what a rank that has not heard of it has
    // written since: in this dispatch or, if this rank is ahead, in an earlier one.
    std::vector<Headers> rounds;
    for (int each = has_failed(rank) ? 0 : number; each <= number; ++each) {
      rounds.push_back(headers_of(rank, object, each));
    }
    for (std::size_t i = 0; i < window.num_rows() * top_k; ++i) {
      const std::uint32_t bits = kWeights.get(start + window.weights(), i);
      const bool is_right = std::any_of(rounds.begin(), rounds.end(), [&](const Headers& each) {
        return bits == kWeights.bits(each.weights[i]);
      });
      require(is_right || (has_failed(rank) ? bits == ~0u : rounds[0].experts[i] < 0),
              "ll dispatch: weights of rank ", rank, " in row ", i / top_k,
              has_failed(rank) ? ", whose group has failed: not all NaN" : "");
      require((has_failed(rank) && experts[i] == -1) ||
                  std::any_of(rounds.begin(), rounds.end(),
                              [&](const Headers& each) { return experts[i] == each.experts[i]; }),
              "ll dispatch: experts of rank ", rank);
    }
    if (has_failed(rank)) return;
    bad_ranks_[rank].insert(routing.bad_ranks.begin(), routing.bad_ranks.end());
    require(ranks_in(mailboxes[rank].bad_low_latency) == bad_ranks_[rank],
            "ll dispatch: bad ranks");
  }

  // Rows of assignments lie in the opposite order of their pairs.
  void make_returned_rows(int rank, Object& object, int number) {
    const LowLatencyWindow& window = object.window;
    const Round& round = object.rounds[number];
    const auto& pairs = round.routing.pairs[rank];
    const bool has_rows_of = round.experts == Experts::kAssignments;
    const int hidden = window.sum_bytes / object.numbers.size(), top_k = window.top_k;
    OfRank& mine = object.ranks[rank];
    std::size_t num_rows = has_rows_of ? 0 : window.num_rows();
    for (const Pair& pair : pairs) num_rows += has_rows_of ? pair.assignments.size() : 0;
    mine.y.emplace(num_rows * window.sum_bytes, kGarbage);
    mine.rows_of.emplace(4 * window.num_rows() * top_k, kGarbage);
    std::size_t next = num_rows;
    for (const Pair& pair : pairs) {
      const std::size_t row_index = object.row_of(pair);
      auto* rows_of = mine.rows_of->data<std::int32_t>() + row_index * top_k;
      std::fill_n(rows_of, top_k, -1);
      for (int k = 0; k < object.num_returned(number, pair); ++k) {
        const std::size_t row = has_rows_of ? --next : row_index;
        rows_of[k] = static_cast<int>(row);
        object.numbers.put(mine.y->data<char>() + row * window.sum_bytes, hidden,
                           [&](int i) { return object.returned(number, rank, pair, k, i); });
      }
    }
  }

  void combine(int rank, const Step& step) {
    Object& object = objects_[step.object];
    const LowLatencyWindow& window = object.window;
    const Experts experts = object.rounds[step.round].experts;
    const int num_tokens = object.num_tokens(rank, step.round);
    OfRank& mine = object.ranks[rank];
    if (step.sends) {
      make_returned_rows(rank, object, step.round);
      mine.out.emplace(std::size_t{1} * num_tokens * window.sum_bytes, kGarbage);
    }
    LowLatencyCombine job{};
    job.sends = step.sends;
    job.completes = step.completes;
    job.y = experts == Experts::kNothing ? object.windows[rank].data<char>() + window.rows()
                                         : mine.y->data<char>();
    job.rows_of = experts == Experts::kAssignments ? mine.rows_of->data<std::int32_t>() : nullptr;
    job.num_rows = static_cast<int>(mine.y->num_bytes() / window.sum_bytes);
    job.out = mine.out->data<char>();
    job.num_tokens = num_tokens;
    job.dtype = object.numbers.dtype();
    const bool had_failed = has_failed(rank);
    const KernelContext ctx = context(rank);
    launch(rank, [&] {
      low_latency_combine(ctx, object.context(rank), job, between(1, kSms), rank,
                          rails(rank, 2 + object.number));
    });
    if (!step.completes) return;
    require(!had_failed || mine.out->is_filled_with(0xff), "ll combine: tokens of rank ", rank,
            ", whose group has failed: not all NaN");
    if (!had_failed) check_combine(rank, object, step.round);
  }

  // Where the group has failed in this very call a number may be NaN, and is right otherwise.
  void check_combine(int rank, Object& object, int number) {
    const Numbers& numbers = object.numbers;
    const int hidden = object.window.sum_bytes / numbers.size();
    const auto sum = [&](int expert_rank, const Pair& pair, int i) {
      float part = 0;
      for (int k = 0; k < object.num_returned(number, pair); ++k) {
        part += numbers.round(object.returned(number, expert_rank, pair, k, i));
      }
      return part;
    };
    const auto total = combined(object.rounds[number].routing, rank, hidden, numbers, sum);
    const char* out = object.ranks[rank].out->data<char>();
    const std::uint32_t nan = numbers.size() == 4 ? ~0u : 0xffff;
    for (std::size_t i = 0; i < total.size(); ++i) {
      if (has_failed(rank) && numbers.get(out, i) == nan) continue;
      require(numbers.get(out, i) == numbers.bits(total[i]), "ll combine: token ", i / hidden,
              " of rank ", rank, " at number ", i % hidden, " of ", hidden);
    }
  }

  std::deque<Object> objects_;
  std::vector<Step> steps_;
  std::vector<std::set<int>> bad_ranks_;  // by rank: whose routing was bad so far
};

}  // namespace

std::unique_ptr<Sequence> draw_low_latency(const Kind& kind, int ranks, int domains,
                                           const Starts& starts) {
  Sizes sizes{};
  sizes.domains = domains;
  sizes.ranks = ranks;
  sizes.starts = starts;
  sizes.local = between(0, 4) == 0 ? 35 : between(1, 3);
  sizes.max_tokens = one_of({1, 5, 33, kLowLatencyTokens});
  if (kind.name == "many") sizes.local = 1, sizes.max_tokens = 5;
  sizes.max_top_k = std::min(sizes.experts(), one_of({1, 3, 8, 32}));
  sizes.max_row_bytes = 16;
  return std::make_unique<LowLatencySteps>(sizes, kind.has_failure ? 1 : between(1, 2));
}
