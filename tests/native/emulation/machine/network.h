// A network between domains of ranks: what kernels put arrives late.
//
// What is put is read from the source's memory at any time until it arrives, as its thread saw that
// memory.  Puts between two ranks arrive in any order, each with a signal; a signal is counted only
// when its put and all earlier ones between the two have arrived.  Between different ranks there is
// no order.  As many puts between two ranks as a queue has places may be on their way; a direction
// can be stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "emulator.h"

namespace emu {

// Places of the queue between two ranks: NCCL's, where a plugin takes one receive, or fewer.
inline int queue_places = 32;

class Network {
 public:
  // The only one that there is, until it ends.
  Network(int num_ranks, int local_ranks, int num_signals);
  ~Network();

  // Memory of a rank that others can put into, after its other windows.
  void add_window(int rank, char* memory, std::size_t num_bytes);
  // As network/rail.cuh has it.
  void put(int rank, int window, int domain, std::size_t to, std::size_t from,
           std::size_t num_bytes, int signal);
  // Up to which put in all there is room in a rank's queue; now and then something arrives before.
  std::uint64_t places_taken(int rank, int domain);
  std::uint64_t room_up_to(int rank, int domain, std::uint64_t end);
  // Nothing gets any further from a rank to a peer until `is_over()`.
  void stop(int rank, int domain, std::function<bool()> is_over);
  // The word of a signal; now and then something arrives before.
  const std::uint64_t* look_at(int rank, int signal);
  // Lets something arrive, or be read.
  void get_further();
  bool is_at_rest() const;
  // Counts a signal up, as if something had been put with it.
  void count(int rank, int signal, std::uint64_t number) { signals_[rank][signal] += number; }
  // Whether more than signals is on its way to or from a rank.
  bool has_bytes_on_the_way(int rank) const;

 private:
  struct Put {
    char* to;
    std::vector<char> bytes;
    const char* from;
    const Known* seen;
    int signal;
    unsigned delay;  // turns in which nothing happens to it
    bool is_read = false, has_arrived = false;
  };
  struct Window {
    char* memory = nullptr;
    std::size_t num_bytes = 0;
  };
  int peer_of(int rank, int domain) const { return domain * local_ranks_ + rank % local_ranks_; }
  std::deque<Put>& between(int source, int target) { return puts_[source * num_ranks_ + target]; }

  const int num_ranks_, local_ranks_;
  std::deque<Fiber> fibers_;                         // what stores into the memory of each rank
  std::vector<std::vector<Window>> windows_;         // by rank
  std::vector<std::vector<std::uint64_t>> signals_;  // by rank
  std::vector<std::deque<Put>> puts_;                // by source and target, in their order
  std::vector<std::uint64_t> num_put_;               // likewise
  std::vector<int> busy_;                            // those of `puts_` with any, ascending
  int stopped_ = -1;                                 // of `puts_`
  std::function<bool()> is_stop_over_;
};

}  // namespace emu
