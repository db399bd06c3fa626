// Sequences in which a rank does not come, not in time, or to another call.
//
// One rank stops before one of its kernels, for good or until the others have given up; or says
// that it goes no further; or is in another call from there on.  Or CTAs start late: one of that
// kernel, and some of later ones on all ranks.  What must hold:
//
// - All kernels end.  A rank that has failed says because of whom, in what and why.
// - Until then a rank has everything, exactly; from then on it has NaN.  `Runner` sees to that.
// - From then on it leaves the others' windows alone.
#include <algorithm>

#include "sequence.h"

using namespace ncclep::native;

namespace {

struct Stopped {};

constexpr int kNever = 1 << 30;

class Failing {
 public:
  Failing(const Sizes& sizes, const std::string& kind)
      : sizes_(sizes),
        world_(sizes),
        steps_(draw_steps(sizes, shares_of(kind), between(3, 8), routings_)) {
    // Nobody who is alone gets past the last one.
    Step last = steps_.front();
    last.number = static_cast<int>(steps_.size());
    last.plan = static_cast<int>(routings_.size());
    routings_.push_back(draw_routing(sizes, 0));
    steps_.push_back(last);
    has_late_ctas_ = kind == "late";
    kind_ = has_late_ctas_    ? one_of({kStops, kComesLate, kHasLateCta})
            : kind == "calls" ? kDiffers
                              : one_of({kStops, kComesLate, kRefuses, kDiffers});
    victim_ = between(0, sizes.ranks - 1);
    kernel_ = between(0, (kind == "calls" ? 1 : 2) * static_cast<int>(steps_.size()));
    failed_at_.assign(sizes.ranks, kNever);
    for (int rank = 0; rank < sizes.ranks; ++rank) {
      auto& runner = runners_.emplace_back(with_deadline(rank), sizes_, routings_);
      runner.before_kernel = [this, rank] {
        if (rank == victim_) maybe_stop();
        if (has_stopped_ && has_late_ctas_ && between(0, 1) == 0) emu::delay(rank, between(1, 4));
      };
    }
  }

  void run() {
    emu::run(sizes_.ranks, [this](int rank) {
      try {
        for (const Step& step : steps_) {
          if (rank == victim_ && !has_stopped_) stopped_in_ = step.number;
          runners_[rank].run(step);
          note(rank, step);
        }
      } catch (const Stopped&) {
      }
      ++num_over_;
    });
    check_reports();
    for (int rank = 0; rank < sizes_.ranks; ++rank) {
      if (failed_at_[rank] != kNever) check_that_nobody_is_disturbed(rank);
    }
  }

 private:
  enum Kind { kStops, kComesLate, kHasLateCta, kRefuses, kDiffers };

  // Ranks give up at different times, now and then.
  KernelContext with_deadline(int rank) {
    KernelContext me = world_.of(rank);
    me.deadline_ns = deadlines_.emplace_back(emu::kJump * between(0, 2) + emu::kJump / 2);
    return me;
  }

  void maybe_stop() {
    if (kernel_-- != 0) return;
    has_stopped_ = true;
    if (kind_ == kRefuses) runners_[victim_].refuse();
    if (kind_ == kStops || kind_ == kRefuses) throw Stopped();
    if (kind_ == kDiffers) runners_[victim_].differs = true;
    if (kind_ == kHasLateCta) emu::delay(victim_, between(1, 4));
    while (kind_ == kComesLate && num_over_ < sizes_.ranks - 1) emu::yield();
  }

  // A step is over: is it the one in which this rank has failed?
  void note(int rank, const Step& step) {
    const State& state = world_.state(rank);
    if (state.failed == 0 || failed_at_[rank] != kNever) return;
    failed_at_[rank] = step.number;
    const Mailbox& mailbox = world_.mailbox(rank);
    const auto phase = static_cast<Phase>(mailbox.failed_phase);
    require(step.kind == Step::kDispatch  ? phase == Phase::kDispatch
            : step.kind == Step::kCombine ? phase == Phase::kCombine
                                          : phase == Phase::kPlan || phase == Phase::kRoutes,
            "failure: rank ", rank, " names phase ", mailbox.failed_phase, " in step ",
            step.number);
    require(step.kind == Step::kPlan || mailbox.failed_epoch == state.epoch, "failure: rank ", rank,
            " names operation ", mailbox.failed_epoch);
    check_reason(rank, static_cast<Reason>(mailbox.failed_reason), mailbox, step);
    require(mailbox.failed_deadline_ns == deadlines_[rank], "failure: the deadline of rank ", rank);
  }

  void check_reason(int rank, Reason reason, const Mailbox& mailbox, const Step& step) {
    if (kind_ == kRefuses) {
      require(reason == Reason::kRefused && mailbox.failed_peer == victim_, "failure: rank ", rank,
              " does not say that rank ", victim_, " refused");
    } else if (kind_ == kDiffers) {
      const bool is_right = mailbox.failed_peer == victim_ || rank == victim_;
      require(reason == Reason::kDiffers && is_right, "failure: rank ", rank,
              " does not say that rank ", victim_, " is in another call");
      for (const bool is_peer : {false, true}) {
        const int whose = is_peer ? mailbox.failed_peer : rank;
        require(mailbox.failed_calls[is_peer] == runners_[whose].call_of(step, whose == victim_),
                "failure: rank ", rank, " names another call of rank ", whose);
      }
    } else {
      require(reason == Reason::kLate, "failure: rank ", rank, " does not say that it waited");
      // A plan on which hosts agree compares nothing.
      const auto phase = static_cast<Phase>(mailbox.failed_phase);
      const bool compares = phase == Phase::kDispatch || phase == Phase::kCombine;
      require(!compares || kind_ != kStops || rank == victim_ || mailbox.failed_peer != victim_ ||
                  world_.state(rank).waited_ns > 0,
              "failure: rank ", rank, " has not written down that it waited");
    }
  }

  void check_reports() {
    const int first = *std::min_element(failed_at_.begin(), failed_at_.end());
    for (int rank = 0; rank < sizes_.ranks; ++rank) {
      const Mailbox& mailbox = world_.mailbox(rank);
      const int peer = mailbox.failed_peer;
      if (failed_at_[rank] == kNever) {
        const bool has_refused = kind_ == kRefuses && rank == victim_ && has_stopped_;
        require((mailbox.failed_phase != 0) == has_refused, "failure: rank ", rank,
                has_refused ? " does not say that it has refused" : " says that it has failed");
        const bool is_alone = has_stopped_ && kind_ != kHasLateCta && sizes_.ranks > 1 &&
                              !((kind_ == kStops || kind_ == kRefuses) && rank == victim_);
        // In the last plan the others may have all that they need; a plan on which the hosts agree
        // compares nothing.
        const bool may_go_on =
            stopped_in_ == steps_.back().number || (kind_ == kDiffers && !is_compared_later());
        require(!is_alone || may_go_on, "failure: rank ", rank, " has waited for nobody");
        continue;
      }
      require(has_stopped_, "failure: rank ", rank, " of all that came");
      // It waits for the one that does not come, or for one that has failed itself; in the step in
      // which the others are stuck only for the former, or in a combine, where the warp that
      // compares the calls has sums to make, too.  Who has late CTAs may be anybody.
      const int step = failed_at_[rank];
      const bool passes_on = step > first || steps_[step].kind == Step::kCombine;
      const bool is_right = peer == victim_ || rank == victim_ || has_late_ctas_ ||
                            (passes_on && failed_at_[peer] <= step);
      require(is_right, "failure: rank ", rank, " names rank ", peer, " instead of ", victim_);
    }
  }

  // Whether a step after the one in which a rank stopped compares the ranks' calls.
  bool is_compared_later() const {
    return std::any_of(steps_.begin() + stopped_in_ + 1, steps_.end(), [&](const Step& step) {
      return step.kind != Step::kPlan || routings_[step.plan].limit > 0;
    });
  }

  // What is queued after a failure.
  void check_that_nobody_is_disturbed(int rank) {
    const auto before = world_.windows_but_of(rank);
    emu::run(sizes_.ranks, [&](int other) {
      if (other != rank) return;
      for (const Step& step : steps_) {
        if (step.kind != Step::kPlan || routings_[step.plan].limit > 0) runners_[rank].run(step);
      }
    });
    require(world_.windows_but_of(rank) == before, "failure: rank ", rank,
            " writes into other ranks' windows afterwards");
  }

  const Sizes sizes_;
  World world_;
  std::vector<Routing> routings_;
  std::vector<Step> steps_;
  Kind kind_;
  int victim_, kernel_;  // that stops, and before which of its kernels
  bool has_late_ctas_, has_stopped_ = false;
  int stopped_in_ = 0;          // step
  int num_over_ = 0;            // hosts
  std::deque<Runner> runners_;  // by rank
  std::vector<int> failed_at_;  // by rank: step
  std::vector<std::uint64_t> deadlines_;
};

}  // namespace

void run_failure(const Sizes& sizes, const std::string& kind) { Failing(sizes, kind).run(); }
