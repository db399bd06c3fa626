// Random sequences of steps on the emulator, compared with an oracle.
//
//   rounds KIND RANKS SEED NUMBER [CHANGE]
//   rounds paths RANKS 0 DOMAINS
//
// Runs NUMBER sequences of a KIND (sequence.h) with RANKS ranks, from SEED on, with a change to the
// kernels in force, if any.  Counters start at 0 where SEED is even, and wrap where it is odd.
// Ranks go through a sequence at their own pace: they wait only for what the kernels make them wait
// for.  The last line is "OK ..." or "FAILED: ..."; the exit status says the same.  The other form
// prints how long the kernels' paths are on a rank of so many (paths.cpp).
//
// With a failure, one rank, the victim, stops before one of its kernels, also between the rounds of
// a call, for good or until the others have given up; or refuses the call; or makes other calls
// from there on.  Or CTAs start late: one of that kernel, and some of later ones on all ranks.
// Then:
//
// - All kernels end.  A rank whose group has failed says because of which rank, where and why.
// - Until then a rank has the right results; from then on it has NaN.
// - From then on it does not write into the others' windows.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "native/device/stop.h"
#include "sequence.h"

using namespace ncclep::native;
using emu::between;
using emu::one_of;

// --- the memory of all ranks ---------------------------------------------------------------------

Sequence::Sequence(const Sizes& drawn)
    : sizes(drawn),
      states(drawn.ranks),
      mailboxes(drawn.ranks),
      deadlines_ns(drawn.ranks, emu::kJump / 2),
      calls_(drawn.ranks, Call::kNone) {
  shared_.control = {sizes.ranks,     sizes.experts(), num_chunks_of(sizes.max_tokens) * kChunk,
                     sizes.max_top_k, sizes.domains,   sizes.rounds};
  shared_.dispatch_bytes = dispatch_bytes(shared_.control, sizes.max_row_bytes);
  if (sizes.domains > 1) {
    network_.emplace(sizes.ranks, sizes.ranks / sizes.domains, kNumRailSignals * sizes.domains);
  }
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    control_.emplace_back(RailLayout{shared_.control}.end(), 0);
    rows_.emplace_back(rows_window_bytes(shared_.control, sizes.max_row_bytes), kGarbage);
    add_to_network(rank, control_[rank]);
    add_to_network(rank, rows_[rank]);
    State& state = states[rank];
    std::memset(static_cast<void*>(&state), 0, sizeof(State));
    state.epoch = sizes.starts.operations;
    state.plans = sizes.starts.plans;
    state.dispatches = state.dispatch_calls = sizes.starts.dispatches;
    state.entries = sizes.starts.entries;
    emu::add_memory(&state, sizeof(State));
    std::memset(static_cast<void*>(&mailboxes[rank]), 0, sizeof(Mailbox));
  }
  emu::before_launch = [this](int rank) {
    if (calls_[rank] == Call::kNone) return;
    const bool begins_call = calls_[rank] == Call::kBegins;
    calls_[rank] = Call::kGoesOn;
    before_kernel(rank, begins_call);
  };
}

Sequence::~Sequence() {
  emu::before_launch = [](int) {};
  for (State& state : states) emu::forget_memory(&state);
}

Bytes Sequence::windows_but_of(int rank) {
  while (network_ && !network_->is_at_rest()) network_->get_further();
  Bytes copies;
  for (int other = 0; other < sizes.ranks; ++other) {
    if (other == rank) continue;
    copies.push_back(control_[other].copy());
    copies.push_back(rows_[other].copy());
  }
  return copies;
}

void Sequence::require_at_rest() {
  for (const State& state : states) {
    require(state.arrived == 0 && state.leaving == 0 && state.next == 0,
            "a kernel left its state as it was in the middle");
  }
}

KernelContext Sequence::context(int rank, std::uint64_t call) {
  KernelContext ctx = shared_;
  ctx.rank = rank;
  const int first = rank - sizes.local_rank_of(rank);
  ctx.control_of.first_rank = ctx.rows_of.first_rank = first;
  for (int local_rank = 0; local_rank < sizes.ranks / sizes.domains; ++local_rank) {
    ctx.control_of.of_local_rank[local_rank] = control_[first + local_rank].data<char>();
    ctx.rows_of.of_local_rank[local_rank] = rows_[first + local_rank].data<char>();
  }
  ctx.state = &states[rank];
  ctx.mailbox = &mailboxes[rank];
  ctx.deadline_ns = deadlines_ns[rank];
  ctx.call = call;
  return ctx;
}

void Sequence::launch(int rank, const std::function<void()>& queue) {
  calls_[rank] = Call::kBegins;
  queue();
  emu::synchronize(rank);
  calls_[rank] = Call::kNone;
}

void Sequence::refuse(int rank) {
  ncclep::native::refuse(context(rank), Phase::kDispatch, rank, rails(rank));
  emu::synchronize(rank);
}

// As all ranks' hosts do before windows close: those of the group, or of a low-latency object.
void Sequence::settle(bool is_cut) {
  if (!network_) return;
  emu::run(sizes.ranks, [&](int rank) {
    ncclep::native::drain_network(context(rank), rank, *rails(rank));
    emu::synchronize(rank);
    require(is_cut || !network_->has_bytes_on_the_way(rank),
            "bytes are on their way to or from rank ", rank, ", whose windows close");
  });
}

void Sequence::cut(int rank, const std::function<bool()>& is_over) {
  const int domain = (sizes.domain_of(rank) + between(1, sizes.domains - 1)) % sizes.domains;
  network_->stop(rank, domain, is_over);
}

// --- without a failure, and with one -------------------------------------------------------------

namespace {

// A number of domains, at least 2.
int draw_domains(int ranks) {
  std::vector<int> domains;
  for (int number = 2; number <= ranks; ++number) {
    if (ranks % number == 0) domains.push_back(number);
  }
  return domains[emu::draw(domains.size())];
}

std::unique_ptr<Sequence> draw_sequence(const Kind& kind, int ranks, const Starts& starts) {
  if (kind.name == "probes") return draw_probes(ranks, draw_domains(ranks), starts);
  const int domains = !kind.has_rails ? 1 : kind.is_wide ? 2 : draw_domains(ranks);
  return (kind.is_low_latency ? draw_low_latency : draw_rows)(kind, ranks, domains, starts);
}

void run_without_failure(Sequence& sequence) {
  const int ranks = sequence.sizes.ranks;
  emu::run(ranks, [&](int rank) {
    for (int step = 0; step < sequence.num_steps(); ++step) sequence.run(rank, step);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    const Mailbox& mailbox = sequence.mailboxes[rank];
    require(sequence.states[rank].failed == 0, "a wait was in vain: of rank ", rank, " for rank ",
            mailbox.failed_peer, ", in phase ", mailbox.failed_phase);
  }
  // Windows close while words of a rank that has refused a call are still on their way.
  const int victim = between(0, ranks - 1);
  emu::run(ranks, [&](int rank) {
    if (rank == victim) sequence.refuse(rank);
  });
  sequence.settle();
  sequence.require_at_rest();
}

class WithFailure {
 public:
  WithFailure(Sequence& sequence, const Kind& kind)
      : sequence_(sequence),
        ranks_(sequence.sizes.ranks),
        has_late_ctas_(kind.name == "late"),
        has_objects_(kind.is_low_latency),
        how_(kind.name == "cut" ? Failing::kIsCut
             : has_late_ctas_ ? one_of({Failing::kStops, Failing::kComesLate, Failing::kHasLateCta})
             : kind.name == "calls" ? Failing::kDiffers
                                    : one_of({Failing::kStops, Failing::kComesLate,
                                              Failing::kRefuses, Failing::kDiffers})),
        victim_(between(ranks_ > 32 ? 32 : 0, ranks_ - 1)),
        kernels_left_(between(0, sequence.last_kernel())),
        current_step_(ranks_, 0),
        failed_in_(ranks_, kNever) {
    // Ranks give up at different times, now and then.
    for (auto& deadline_ns : sequence.deadlines_ns) {
      deadline_ns = emu::kJump * (how_ == Failing::kIsCut ? 4 : between(0, 2)) + emu::kJump / 2;
    }
    // So what the victim puts after it has given up still comes in time.
    if (how_ == Failing::kIsCut) sequence.deadlines_ns[victim_] = emu::kJump / 2;
    sequence.before_kernel = [this](int rank, bool begins_call) {
      if (rank == victim_ && !has_stopped_) maybe_stop(begins_call);
      if (has_stopped_ && has_late_ctas_ && between(0, 1) == 0) emu::delay(rank, between(1, 4));
    };
  }

  void run() {
    emu::run(ranks_, [this](int rank) {
      try {
        for (int step = 0; step < sequence_.num_steps(); ++step) {
          current_step_[rank] = step;
          sequence_.run(rank, step);
          note_failure(rank, step);
        }
      } catch (const Stopped&) {
      }
      ++num_over_;
    });
    check_reports();
    const bool is_cut = how_ == Failing::kIsCut;
    if (how_ == Failing::kRefuses || how_ == Failing::kDiffers || is_cut) sequence_.settle(is_cut);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (failed_in_[rank] != kNever) check_that_nobody_is_disturbed(rank);
    }
  }

 private:
  struct Stopped {};
  static constexpr int kNever = 1 << 30;

  void maybe_stop(bool begins_call) {
    if (--kernels_left_ >= 0) return;
    const int step = current_step_[victim_];
    const bool is_of_host = how_ == Failing::kRefuses || how_ == Failing::kDiffers;
    if (is_of_host && !begins_call) return;                                // but the next may
    if (how_ == Failing::kDiffers && !sequence_.can_differ(step)) return;  // likewise
    has_stopped_ = true;
    stopped_in_ = step;
    if (how_ == Failing::kIsCut) {
      const bool is_for_good = between(0, 3) == 0;
      sequence_.cut(victim_, [this, is_for_good] {
        return !is_for_good && sequence_.states[victim_].failed != 0;
      });
    }
    if (how_ == Failing::kRefuses) sequence_.refuse(victim_);
    if (how_ == Failing::kStops || how_ == Failing::kRefuses) throw Stopped();
    if (how_ == Failing::kDiffers) sequence_.differing = victim_;
    if (how_ == Failing::kHasLateCta) emu::delay(victim_, between(1, 4));
    while (how_ == Failing::kComesLate && num_over_ < ranks_ - 1) emu::yield();
  }

  void note_failure(int rank, int step) {
    if (sequence_.states[rank].failed == 0 || failed_in_[rank] != kNever) return;
    failed_in_[rank] = step;
    require(sequence_.mailboxes[rank].failed_deadline_ns == sequence_.deadlines_ns[rank],
            "failure: the deadline of rank ", rank);
    sequence_.check_failure(rank, step, how_, victim_);
  }

  void check_reports() {
    const int first = *std::min_element(failed_in_.begin(), failed_in_.end());
    for (int rank = 0; rank < ranks_; ++rank) {
      const Mailbox& mailbox = sequence_.mailboxes[rank];
      const int peer = mailbox.failed_peer, step = failed_in_[rank];
      if (step == kNever) {
        const bool has_refused = how_ == Failing::kRefuses && rank == victim_ && has_stopped_;
        require((mailbox.failed_phase != 0) == has_refused, "failure: rank ", rank,
                has_refused ? " does not say that it has refused" : " says that it has failed");
        const bool has_left =
            rank == victim_ && (how_ == Failing::kStops || how_ == Failing::kRefuses);
        const bool is_alone =
            has_stopped_ && how_ != Failing::kHasLateCta && ranks_ > 1 && !has_left;
        // What was put before may be on its way, and others miss the rail peer only afterwards.
        const bool is_soon_over = stopped_in_ + (has_objects_ ? 6 : 3) >= sequence_.num_steps();
        require(!is_alone || (how_ == Failing::kIsCut
                                  ? is_soon_over
                                  : sequence_.may_go_on(how_, stopped_in_, rank == victim_)),
                "failure: rank ", rank, " has waited for nobody");
        continue;
      }
      require(has_stopped_, "failure: rank ", rank, " of all that came");
      // Operations of low-latency objects are no operations of the group.
      require(how_ != Failing::kRefuses || step >= stopped_in_ || has_objects_, "failure: rank ",
              rank, " before the call that was refused");
      // It waits for the victim or for a rank that has failed itself: in a later step, or in a
      // step whose warps wait for several things.  With late CTAs it may be any rank.
      const bool passes_on = step > first || !sequence_.waits_for_one_thing(step);
      // The victim passes on what its rail peers say.  Where its puts get no further, each rank is
      // late in its turn, for others.
      const Sizes& sizes = sequence_.sizes;
      const bool speaks_for_peer = sizes.domain_of(victim_) == sizes.domain_of(rank) &&
                                   sizes.local_rank_of(victim_) == sizes.local_rank_of(peer);
      const bool is_right = peer == victim_ || rank == victim_ || has_late_ctas_ ||
                            speaks_for_peer || (how_ == Failing::kIsCut && peer != rank) ||
                            (passes_on && failed_in_[peer] <= step);
      require(is_right, "failure: rank ", rank, " names rank ", peer, " instead of ", victim_);
    }
  }

  // What is queued after a failure.
  void check_that_nobody_is_disturbed(int rank) {
    const Bytes before = sequence_.windows_but_of(rank);
    emu::run(ranks_, [&](int other) {
      for (int step = 0; other == rank && step < sequence_.num_steps(); ++step) {
        if (!sequence_.is_agreed(step)) sequence_.run(rank, step);
      }
    });
    require(sequence_.windows_but_of(rank) == before, "failure: rank ", rank,
            " writes into other ranks' windows afterwards");
  }

  Sequence& sequence_;
  const int ranks_;
  const bool has_late_ctas_, has_objects_;
  const Failing how_;
  const int victim_;
  int kernels_left_;  // of the victim, before it stops
  bool has_stopped_ = false;
  int stopped_in_ = 0;  // step
  int num_over_ = 0;    // hosts
  std::vector<int> current_step_, failed_in_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) emu::fail("usage: rounds KIND RANKS SEED NUMBER [CHANGE]");
  const Kind kind(argv[1]);
  const int ranks = std::atoi(argv[2]), first = std::atoi(argv[3]), number = std::atoi(argv[4]);
  if (argc > 5) emu::change_in_force = std::atoi(argv[5]);
  if (kind.name == "paths") return print_paths(ranks, number), 0;
  for (int seed = first; seed < first + number; ++seed) {
    std::printf("%s, %d ranks, seed %d\n", argv[1], ranks, seed);
    std::fflush(stdout);
    emu::seed(seed * 16 + ranks);
    if (kind.is_short) emu::queue_places = between(1, 4);
    const auto sequence = draw_sequence(kind, ranks, Starts{seed % 2 == 1});
    for (int closed = between(0, 2); closed > 0; --closed) sequence->settle();
    kind.has_failure ? WithFailure(*sequence, kind).run() : run_without_failure(*sequence);
  }
  std::printf("OK: %d sequences\n", number);
}
