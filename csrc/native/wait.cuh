// The only loops that wait: for a word that another rank writes, and for the other CTAs of a grid.
//
// Every wait has the group's deadline.  When it passes, who waited for whom is written to the
// mailbox, and from then on no wait of this rank waits: kernels run to their end, and the host
// raises.
#pragma once

#include <cuda_runtime.h>

#include "common/order.cuh"
#include "native/state.h"

namespace ncclep::native {

__device__ inline bool has_failed(const Rank& me) {
  return *static_cast<volatile unsigned int*>(&me.state->failed) != 0;
}

__device__ inline void report_failure(const Rank& me, Phase phase, int peer, std::uint64_t epoch) {
  if (atomicExch(&me.state->failed, 1u) != 0) return;
  me.mailbox->failed_peer = peer;
  me.mailbox->failed_epoch = epoch;
  __threadfence_system();
  me.mailbox->failed_phase = static_cast<std::uint32_t>(phase);
}

// The time that a wait has left.
class Deadline {
 public:
  // Asked again and again by a wait that goes on.  True when the deadline passed, now or before.
  __device__ bool has_passed(const Rank& me, Phase phase, int peer, std::uint64_t epoch) {
    if (++num_asked_ % 64 != 0) return false;
    if (has_failed(me)) return true;
    if (start_ == 0) start_ = now_ns();
    if (now_ns() - start_ <= me.deadline_ns) return false;
    report_failure(me, phase, peer, epoch);
    return true;
  }

 private:
  unsigned int num_asked_ = 0;
  std::uint64_t start_ = 0;
};

// Calls `is_over` until it is true.  False when the deadline passed, now or before.
template <typename IsOver>
__device__ bool wait_until(const Rank& me, Phase phase, int peer, std::uint64_t epoch,
                           IsOver&& is_over) {
  for (Deadline deadline; !is_over();) {
    if (deadline.has_passed(me, phase, peer, epoch)) return false;
  }
  return true;
}

// Waits until `word`, which only `peer` writes, is at least `epoch`.
__device__ inline bool wait_for(const Rank& me, Phase phase, int peer, const std::uint64_t* word,
                                std::uint64_t epoch) {
  return wait_until(me, phase, peer, epoch, [&] { return load_acquire(word) >= epoch; });
}

// A number and what belongs to it, in one word.
__device__ inline void post_numbered(std::uint64_t* word, std::uint64_t number,
                                     std::uint32_t value) {
  store_relaxed(word, number << 32 | value);
}

__device__ inline bool has_number(std::uint64_t word, std::uint64_t number) {
  return word >> 32 == (number & 0xffffffffu);
}

// What `peer` posted with `number`; -1 when the deadline passed.
__device__ inline std::int64_t wait_for_numbered(const Rank& me, Phase phase, int peer,
                                                 const std::uint64_t* word, std::uint64_t number) {
  std::uint64_t value = 0;
  const bool is_here = wait_until(me, phase, peer, number, [&] {
    value = load_relaxed(word);
    return has_number(value, number);
  });
  return is_here ? static_cast<std::int64_t>(value & 0xffffffffu) : -1;
}

// The word in this rank's control window that `peer` writes for `signal`.
__device__ inline std::uint64_t* signal_word(char* control, const Control& layout, Signal signal,
                                             int peer) {
  return reinterpret_cast<std::uint64_t*>(control + layout.signals()) + signal * layout.num_ranks +
         peer;
}

// Words in shared memory that one thread of a CTA writes and other warps look at; fences say what
// goes with them.  They are atomic, so that compute-sanitizer does not take them for races.
__device__ inline void show(int* word, int value) { atomicExch(word, value); }
__device__ inline int look(int* word) { return atomicAdd(word, 0); }

// The operation that this kernel is; the same on every rank, and in every CTA until `leave`.
__device__ inline std::uint64_t current_epoch(const Rank& me) {
  return *static_cast<volatile std::uint64_t*>(&me.state->epoch) + 1;
}

// All threads of all CTAs arrive here; the grid must be resident (a cooperative launch).  What was
// written before is visible after.
__device__ inline void grid_barrier(const Rank& me, Phase phase) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned int ticket = atomicAdd(&me.state->arrived, 1u);
    const unsigned int goal = (ticket / gridDim.x + 1) * gridDim.x;
    wait_until(me, phase, me.rank, goal,
               [&] { return *static_cast<volatile unsigned int*>(&me.state->arrived) >= goal; });
    __threadfence();
  }
  __syncthreads();
}

// All threads call this last.  True for all threads of the CTA that leaves last; what the others
// wrote is visible to it, also to be passed on to other ranks.
__device__ inline bool leave(const Rank& me) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // One fence for all threads: it also orders what this thread has seen of the others.
    __threadfence_system();
    is_last = atomicAdd(&me.state->leaving, 1u) == gridDim.x - 1;
    if (is_last) me.state->arrived = me.state->leaving = me.state->next = 0;
    __threadfence_system();
  }
  __syncthreads();
  return is_last;
}

}  // namespace ncclep::native
