// The only loops that wait: for a word that another rank writes, and for the other CTAs of a grid.
//
// Every wait has the group's deadline.  When it passes, who waited for whom is written to the
// mailbox and the group has failed: no wait of this rank waits any longer, the kernel runs to its
// end and fills what it was to deliver with NaN, later kernels of the group do nothing else, and
// the host raises.  So it is, without the deadline, when a rank says that it goes no further
// (refusal.h), or is found to be in another call (call_barrier.cuh).
#pragma once

#include <cuda_runtime.h>

#include "common/order.cuh"
#include "native/state.h"

namespace ncclep::native {

__device__ inline bool has_failed(const KernelContext& me) {
  return *static_cast<volatile unsigned int*>(&me.state->failed) != 0;
}

// Because of `peer`; `its_call` is for Reason::kDiffers.
__device__ inline void report_failure(const KernelContext& me, Reason reason, Phase phase, int peer,
                                      std::uint64_t epoch, std::uint64_t its_call = 0) {
  if (atomicExch(&me.state->failed, 1u) != 0) return;
  me.mailbox->failed_reason = static_cast<std::uint32_t>(reason);
  me.mailbox->failed_peer = peer;
  me.mailbox->failed_deadline_ns = me.deadline_ns;
  me.mailbox->failed_epoch = epoch;
  me.mailbox->failed_calls[0] = me.call;
  me.mailbox->failed_calls[1] = its_call;
  __threadfence_system();
  me.mailbox->failed_phase = static_cast<std::uint32_t>(phase);
}

// Where a rank that goes no further says so to rank `to`.
__device__ inline std::uint64_t* stop_word(const KernelContext& me, int to) {
  return reinterpret_cast<std::uint64_t*>(me.control_of[to] + me.control.stop());
}

// Whether another rank goes no further, so that there is nothing to wait for.
__device__ inline bool is_refused(const KernelContext& me, Phase phase, std::uint64_t epoch) {
  const std::uint64_t word = load_relaxed(stop_word(me, me.rank));
  if (word == 0) return false;
  report_failure(me, Reason::kRefused, phase, static_cast<int>(word) - 1, epoch);
  return true;
}

// The time that a wait has left.
class Deadline {
 public:
  // Asked again and again by a wait that goes on.  True when it is in vain, or too long, now or
  // before.
  __device__ bool has_passed(const KernelContext& me, Phase phase, int peer, std::uint64_t epoch) {
    if (++num_asked_ % 64 != 0) return false;
    if (has_failed(me) || is_refused(me, phase, epoch)) return true;
    if (start_ == 0) start_ = now_ns();
    if (now_ns() - start_ <= me.deadline_ns) return false;
    report_failure(me, Reason::kLate, phase, peer, epoch);
    return true;
  }

 private:
  unsigned int num_asked_ = 0;
  std::uint64_t start_ = 0;
};

// Calls `is_over` until it is true.  False when the group has failed, now or before.
template <typename IsOver>
__device__ bool wait_until(const KernelContext& me, Phase phase, int peer, std::uint64_t epoch,
                           IsOver&& is_over) {
  for (Deadline deadline; !is_over();) {
    if (deadline.has_passed(me, phase, peer, epoch)) return false;
  }
  return true;
}

// Waits until `word`, which only `peer` writes, is at least `epoch`.
__device__ inline bool wait_for(const KernelContext& me, Phase phase, int peer,
                                const std::uint64_t* word, std::uint64_t epoch) {
  return wait_until(me, phase, peer, epoch, [&] { return load_acquire(word) >= epoch; });
}

// A number and what belongs to it, in one word: the lower 31 bits of the number above 32 bits of
// value.  The highest bit is set, so that a word of a new window, which is zero, has no number.
__device__ inline std::uint64_t numbered(std::uint64_t number, std::uint32_t value) {
  constexpr std::uint64_t kIsWritten = std::uint64_t{1} << 63;
  return kIsWritten | number << 32 | value;
}

__device__ inline void post_numbered(std::uint64_t* word, std::uint64_t number,
                                     std::uint32_t value) {
  store_relaxed(word, numbered(number, value));
}

__device__ inline bool has_number(std::uint64_t word, std::uint64_t number) {
  return word >> 32 == numbered(number, 0) >> 32;
}

// What `peer` posted with `number`; -1 when the group has failed.  With kLoad = load_acquire, what
// it wrote before is visible, too.
template <std::uint64_t (*kLoad)(const std::uint64_t*) = load_relaxed>
__device__ std::int64_t wait_for_numbered(const KernelContext& me, Phase phase, int peer,
                                          const std::uint64_t* word, std::uint64_t number) {
  std::uint64_t found = 0;
  const bool is_here = wait_until(me, phase, peer, number, [&] {
    found = kLoad(word);
    return has_number(found, number);
  });
  return is_here ? static_cast<std::int64_t>(found & 0xffffffffu) : -1;
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
__device__ inline std::uint64_t current_epoch(const KernelContext& me) {
  return *static_cast<volatile std::uint64_t*>(&me.state->epoch) + 1;
}

// All threads of all CTAs arrive here; the grid must be resident (a cooperative launch).  What was
// written before is visible after.  False, for the whole CTA, when the group has failed: what the
// other CTAs should have written may be missing.
__device__ inline bool grid_barrier(const KernelContext& me, Phase phase) {
  bool all_here = true;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned int arrival = atomicAdd(&me.state->arrived, 1u);
    const unsigned int goal = (arrival / gridDim.x + 1) * gridDim.x;
    all_here = wait_until(me, phase, me.rank, goal, [&] {
      return *static_cast<volatile unsigned int*>(&me.state->arrived) >= goal;
    });
    __threadfence();
  }
  return __syncthreads_and(all_here);
}

// Whether the group had failed before this kernel, which then moves nothing and tells nobody.  All
// threads of a CTA call it; it is a barrier of the CTA.
__device__ inline bool had_failed(const KernelContext& me) {
  return __syncthreads_or(threadIdx.x == 0 && has_failed(me));
}

// Makes every number NaN in what a failed kernel was to deliver: bf16, fp16 and fp32 of which all
// bits are set.  By one CTA; `memory` is aligned to 16 bytes, and null when there is none.
__device__ inline void fill_nan(void* memory, std::size_t num_bytes) {
  auto* vectors = static_cast<uint4*>(memory);
  auto* words = static_cast<std::uint32_t*>(memory);
  const std::size_t num_vectors = num_bytes / sizeof(uint4);
  for (std::size_t i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    vectors[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (std::size_t i = 4 * num_vectors + threadIdx.x; i < num_bytes / 4; i += blockDim.x) {
    words[i] = ~0u;
  }
}

// All threads call this last.  True for all threads of the CTA that leaves last; what the others
// wrote is visible to it, also to be passed on to other ranks.
__device__ inline bool leave(const KernelContext& me) {
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
