// Words that rail peers put into each other's windows, to verify that the network brings them.
#pragma once

#include <cstdint>

namespace ncclep::network {

struct Rail;

// Words of a window that probes use, at its start: what this rank puts and what arrives, each by
// domain, and all of that twice, for consecutive rounds.  A rail peer is at most one round ahead:
// it waits for this rank's word of every round.  So what it puts or this rank writes in a round
// leaves alone what may still be on its way, or unread, of the round before.
constexpr int probe_words(int num_domains) { return 4 * num_domains; }

// What came from one rail peer.
struct Arrival {
  std::uint64_t word;     // only if it came
  std::uint64_t signals;  // how often that peer has signalled so far
  bool was_taken;         // what this rank puts to it
};

struct Probe {
  std::uint64_t* window;       // its address on this rank
  const std::uint64_t* words;  // [domains]: what this rank puts to each rail peer
  Arrival* arrivals;           // [domains]; that of this rank's own domain is not written
  int domain, num_domains;     // the first is this rank's
  std::uint64_t round;         // from 1
  std::uint64_t deadline_ns;
};

// Queues a kernel that puts a word to each rail peer, with a signal, and waits for theirs until
// each has signalled `round` times or the deadline has passed.
void probe(const Rail& rail, const Probe& arguments, std::uintptr_t stream);

}  // namespace ncclep::network
