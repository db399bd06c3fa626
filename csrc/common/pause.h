// What a host does between two questions while it waits.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace ncclep {

// Call it after `waited` seconds of a wait.  It gives the core away at first, and later sleeps, so
// that the ranks it waits for run where there are fewer cores than ranks.  A rank that sleeps comes
// late to what follows, and the others then wait for it: what is usual in a training step must not
// last until it sleeps.
inline void pause_in_wait(double waited) {
  constexpr double kYieldTime = 5e-3;
  // A sleep is a hundredth of what has been waited, within these: a rank that compiles, or reads
  // data, for seconds has the cores for that, and the others lose 1 %.
  constexpr double kShortestSleep = 50e-6, kLongestSleep = 1e-3;
  if (waited < kYieldTime) {
    sched_yield();
    return;
  }
  const double sleep = std::clamp(waited / 100, kShortestSleep, kLongestSleep);
  std::this_thread::sleep_for(std::chrono::duration<double>(sleep));
}

}  // namespace ncclep
