// The link of one rank to the test network, for puts and for messages: how fast it is, and what
// goes wrong on it, as the rank's environment says.  Without any, the link is as fast as the
// machine:
//
//   RMA_LOOP_GBPS        10^9 bytes per second, in each direction
//   RMA_LOOP_LATENCY_US  from one end to the other
//   RMA_LOOP_RECEIVES    receives of a plugin (8): NCCL's queue to a peer has 32 times as many
//                        places; a power of two, for groups that are made from then on
//   RMA_LOOP_STAGED      1: all bytes pass the memory of the host, also those from GPU to GPU
//   RMA_LOOP_FAULT       what goes wrong with the N-th put of this process, from 1:
//                          drop:N      it is lost, and counts as done at its source
//                          delay:N:MS  it arrives so many milliseconds later
//                          stop:N      it and all later ones are not sent, until this changes
//                          silent:N    the same, and from then on nothing arrives here either
//                          error:N     the call fails
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "plugin.h"

namespace rma {

inline u64 now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ull + now.tv_nsec;
}

enum Fault { kNone, kDrop, kDelay, kStop, kSilent, kError, kNumFaults };

struct Link {
  double gbps = 0, latency_us = 0;  // gbps: bytes per nanosecond; 0: no limit
  double is_staged = 0, receives = 8;
  Fault fault = kNone;
  u64 fault_number = 0, delay_ms = 0;
  u64 out_free_ns = 0, in_free_ns = 0;

  bool is(Fault asked, u64 number) const { return fault == asked && number == fault_number; }
  bool has_begun(Fault asked, u64 number) const { return fault == asked && number >= fault_number; }
  u64 duration_ns(std::size_t size) const { return gbps > 0 ? static_cast<u64>(size / gbps) : 0; }
  // When something that begins at `start` has passed, after what was there before it.
  u64 pass(u64& free_ns, u64 start, std::size_t size) const {
    return free_ns = std::max(free_ns, start) + duration_ns(size);
  }
};

inline bool read_number(const char* variable, double& number) {
  const char* text = getenv(variable);
  if (text == nullptr) return true;
  char* end;
  number = strtod(text, &end);
  if (end != text && *end == 0 && number >= 0) return true;
  fprintf(stderr, "%s=%s: must be a number, at least 0\n", variable, text);
  return false;
}

// False, with words, when the environment is wrong; `link` stays then.
inline bool read_environment(Link& link) {
  Link read;
  const bool are_numbers = read_number("RMA_LOOP_GBPS", read.gbps) &&
                           read_number("RMA_LOOP_LATENCY_US", read.latency_us) &&
                           read_number("RMA_LOOP_STAGED", read.is_staged) &&
                           read_number("RMA_LOOP_RECEIVES", read.receives);
  if (!are_numbers) return false;
  const auto receives = static_cast<unsigned>(read.receives);
  if (receives < 1 || receives != read.receives || (receives & (receives - 1)) != 0) {
    fprintf(stderr, "RMA_LOOP_RECEIVES=%g: must be a power of two\n", read.receives);
    return false;
  }
  if (const char* text = getenv("RMA_LOOP_FAULT")) {
    const char* const names[] = {"none", "drop", "delay", "stop", "silent", "error"};
    char name[16] = "";
    unsigned long long number = 0, delay = 0;
    const int found = sscanf(text, "%15[a-z]:%llu:%llu", name, &number, &delay);
    int fault = kDrop;
    while (fault < kNumFaults && strcmp(name, names[fault]) != 0) ++fault;
    if (fault == kNumFaults || found != (fault == kDelay ? 3 : 2)) {
      fprintf(stderr, "RMA_LOOP_FAULT=%s: must be delay:N:MS, or drop, stop, silent or error:N\n",
              text);
      return false;
    }
    read.fault = static_cast<Fault>(fault);
    read.fault_number = number;
    read.delay_ms = delay;
  }
  link = read;
  return true;
}

inline Link link_;  // of this process
inline std::mutex link_mutex;
using Lock = std::lock_guard<std::mutex>;

// A piece is sent when the link is free so soon: long messages leave room for others.
constexpr u64 kAheadNs = 100'000;

inline bool is_link_free(u64 now) {
  const Lock lock(link_mutex);
  return link_.out_free_ns <= now + kAheadNs;
}
// When a piece that leaves now is at the other end.
inline u64 leave(u64 now, std::size_t size) {
  const Lock lock(link_mutex);
  return link_.pass(link_.out_free_ns, now, size) + static_cast<u64>(link_.latency_us * 1e3);
}
// When it has arrived, after what came before it.
inline u64 arrive(u64 at_end, std::size_t size) {
  const Lock lock(link_mutex);
  return link_.pass(link_.in_free_ns, at_end - link_.duration_ns(size), size);
}

}  // namespace rma
