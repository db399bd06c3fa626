// Random sequences of plans, dispatches and combines on the emulator, held against an oracle.
//
//   rounds KIND RANKS SEED NUMBER [CHANGE]
//
// NUMBER sequences of RANKS ranks, from SEED on, with a change to the kernels in force, if any.
// Counters start at 0 where SEED is even, and wrap where it is odd.
// Ranks run through a sequence at their own pace: what they wait for is what the kernels make them
// wait for.  Ends with a line "OK ..." or "FAILED: ..." and an exit status.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "between_nodes.h"
#include "low_latency.h"
#include "sequence.h"

namespace {

void run_sequence(const Sizes& sizes, const Shares& shares) {
  World world(sizes);
  std::vector<Routing> routings;
  const std::vector<Step> steps = draw_steps(sizes, shares, between(4, 12), routings);
  emu::run(sizes.ranks, [&](int rank) {
    Runner runner(world.of(rank), sizes, routings);
    for (const Step& step : steps) runner.run(step);
  });
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    const auto& state = world.state(rank);
    const auto& mailbox = world.mailbox(rank);
    require(state.failed == 0, "a wait was in vain: of rank ", rank, " for rank ",
            mailbox.failed_peer, ", in phase ", mailbox.failed_phase);
    require(state.arrived == 0 && state.leaving == 0 && state.next == 0,
            "a kernel left its state as it was in the middle");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) emu::fail("usage: rounds KIND RANKS SEED NUMBER [CHANGE]");
  const std::string kind = argv[1];
  const int ranks = std::atoi(argv[2]), first = std::atoi(argv[3]), number = std::atoi(argv[4]);
  if (argc > 5) emu::change_in_force = std::atoi(argv[5]);
  for (int seed = first; seed < first + number; ++seed) {
    std::printf("%s, %d ranks, seed %d\n", kind.c_str(), ranks, seed);
    std::fflush(stdout);
    emu::seed(seed * 16 + ranks);
    const Starts starts = seed % 2 == 0 ? Starts() : Starts::before_wraps();
    if (is_low_latency(kind)) {
      run_low_latency(kind, ranks, starts);
      continue;
    }
    if (kind == "network") {
      run_network_rows();
      continue;
    }
    const Sizes sizes = draw_sizes(kind, ranks, starts);
    const bool has_failure = kind == "failures" || kind == "late" || kind == "calls";
    has_failure ? run_failure(sizes, kind) : run_sequence(sizes, shares_of(kind));
  }
  std::printf("OK: %d sequences\n", number);
}
