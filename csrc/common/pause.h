// How a waiting host thread waits, and pauses between polls.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

namespace ncclep {

// Call it after `waited` seconds of a wait.  It yields the core at first and sleeps later, so that
// the ranks it waits for can run where there are fewer cores than ranks.  A rank that sleeps wakes
// up late and the others then wait for it, so the usual waits of a training step must end before
// the first sleep.
inline void pause_in_wait(double waited) {
  constexpr double kYieldTime = 5e-3;
  // A sleep lasts a hundredth of the time waited so far, within these bounds: a rank that compiles
  // or reads data for seconds gets the cores, and the others lose 1 %.
  constexpr double kShortestSleep = 50e-6, kLongestSleep = 1e-3;
  if (waited < kYieldTime) {
    sched_yield();
    return;
  }
  const double sleep = std::clamp(waited / 100, kShortestSleep, kLongestSleep);
  std::this_thread::sleep_for(std::chrono::duration<double>(sleep));
}

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// How often a waiting host calls `poll`, in seconds.
constexpr double kPollInterval = 0.05;

// Calls `is_over(waited)`, which may throw, until it returns true; `waited` is in seconds.  `poll`
// is called now and then, and may throw.
template <typename IsOver>
void wait_until(const IsOver& is_over, const std::function<void()>& poll) {
  const auto start = Clock::now();
  double next_poll = kPollInterval;
  for (double waited = 0; !is_over(waited); waited = seconds_since(start)) {
    if (waited >= next_poll) {
      poll();
      next_poll = waited + kPollInterval;
    }
    pause_in_wait(waited);
  }
}

}  // namespace ncclep
