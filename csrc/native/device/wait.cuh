// All waiting loops: for a word that another rank writes, and for the other CTAs of a grid.
//
// Every wait has the group's deadline.  When it passes, the kernel writes to the mailbox which rank
// waited for which, and the group has failed: no further wait of this rank blocks, the kernel runs
// to its end and fills its outputs with NaN, later kernels of the group do only the latter, and the
// host raises.  The same happens, without waiting for the deadline, when a rank announces that it
// stops (stop.h) or is found to be in a different call (call_barrier.cuh).
#pragma once

#include <cuda_runtime.h>

#include "common/order.cuh"
#include "native/state.h"

namespace ncclep::native {

__device__ inline bool has_failed(const KernelContext& ctx) {
  return *static_cast<volatile unsigned int*>(&ctx.state->failed) != 0;
}

// `peer` caused the failure; `its_call`: with Reason::kDiffers and kLate.
__device__ inline void report_failure(const KernelContext& ctx, Reason reason, Phase phase,
                                      int peer, std::uint64_t epoch, std::uint64_t its_call = 0) {
  if (atomicExch(&ctx.state->failed, 1u) != 0) return;
  ctx.mailbox->failed_reason = static_cast<std::uint32_t>(reason);
  ctx.mailbox->failed_peer = peer;
  ctx.mailbox->failed_deadline_ns = ctx.deadline_ns;
  ctx.mailbox->failed_epoch = epoch;
  ctx.mailbox->failed_calls[0] = ctx.call;
  ctx.mailbox->failed_calls[1] = its_call;
  __threadfence_system();
  ctx.mailbox->failed_phase = static_cast<std::uint32_t>(phase);
}

// The number of this kernel's operation; the same on every rank, and in every CTA until `leave`.
__device__ inline std::uint64_t current_epoch(const KernelContext& ctx) {
  return *static_cast<volatile std::uint64_t*>(&ctx.state->epoch) + 1;
}

// The number of this kernel's call (call_barrier.cuh); the same on every rank, and in every CTA
// until the last one leaves.
__device__ inline std::uint64_t current_entry(const KernelContext& ctx) {
  return *static_cast<volatile std::uint64_t*>(&ctx.state->entries) + 1;
}

// The word in which `rank` tells rank `to` that it has entered.
__device__ inline std::uint64_t* entry_word(const KernelContext& ctx, int to, std::uint64_t number,
                                            int rank) {
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[to] + ctx.control.entries()) +
         number % 2 * ctx.control.num_ranks + rank;
}

// Whether an entry is that of the call with this number.
__device__ inline bool is_entry_of(std::uint64_t entry, std::uint64_t number) {
  return entry != 0 && entry >> 48 == (number & 0xffffu);
}

// What `peer` has entered as its call with this kernel's number; 0: nothing yet.  Not inlined: it
// is for the end of a group, and would take registers from every wait.
static __device__ __noinline__ std::uint64_t entered_call(const State* state,
                                                          const std::uint64_t* entries,
                                                          int num_ranks, int peer) {
  const std::uint64_t number = *static_cast<const volatile std::uint64_t*>(&state->entries) + 1;
  const std::uint64_t entry = load_relaxed(entries + number % 2 * num_ranks + peer);
  return is_entry_of(entry, number) ? entry & ~(~std::uint64_t{0} << 48) : 0;
}

// The word in which a rank that stops tells rank `to`: the operation before which it stops, and
// 1 + the rank.
__device__ inline std::uint64_t* stop_word(const KernelContext& ctx, int to) {
  return reinterpret_cast<std::uint64_t*>(ctx.control_of[to] + ctx.control.stop());
}
constexpr int kStopBits = 10;
static_assert(kMaxRanks < 1 << kStopBits);

// Whether another rank has stopped, so that there is nothing to wait for.  It has done its part of
// earlier operations, in which others may still wait for each other.
__device__ inline bool is_refused(const KernelContext& ctx, Phase phase, std::uint64_t epoch) {
  const std::uint64_t word = load_relaxed(stop_word(ctx, ctx.rank));
  if (word == 0) return false;
  const int stopped = static_cast<int>(word & ((1u << kStopBits) - 1)) - 1;
  const std::uint64_t now = current_epoch(ctx) << kStopBits, then = word - (stopped + 1);
  if (static_cast<std::int64_t>(now - then) < 0) return false;  // the number may have wrapped
  if (ctx.control.num_domains > 1) {  // the word may have come from a rail peer, who tells no other
    for (int local_rank = 0; local_rank < ctx.control.local_ranks(); ++local_rank) {
      store_relaxed(stop_word(ctx, ctx.control_of.first_rank + local_rank), word);
    }
  }
  report_failure(ctx, Reason::kRefused, phase, stopped, epoch);
  return true;
}

// The time left for one wait.
class Deadline {
 public:
  // Polled by a wait that continues.  True when the group has failed, so that the wait is in vain,
  // or when the deadline has passed.
  __device__ bool has_passed(const KernelContext& ctx, Phase phase, int peer, std::uint64_t epoch) {
    if (++num_asked_ % 64 != 0) return false;
    if (has_failed(ctx) || is_refused(ctx, phase, epoch)) return true;
    if (start_ == 0) start_ = now_ns();
    const std::int64_t waited_ns = ns_since(start_);
    if (waited_ns <= static_cast<std::int64_t>(ctx.deadline_ns)) return false;
    const std::uint64_t* entries = entry_word(ctx, ctx.rank, 0, 0);
    report_failure(ctx, Reason::kLate, phase, peer, epoch,
                   entered_call(ctx.state, entries, ctx.control.num_ranks, peer));
    return true;
  }

 private:
  unsigned int num_asked_ = 0;
  std::uint64_t start_ = 0;
};

// Calls `is_over` until it is true.  False when the group has failed, during this wait or earlier.
template <typename IsOver>
__device__ bool wait_until(const KernelContext& ctx, Phase phase, int peer, std::uint64_t epoch,
                           IsOver&& is_over) {
  for (Deadline deadline; !is_over();) {
    if (deadline.has_passed(ctx, phase, peer, epoch)) return false;
  }
  return true;
}

// Waits in the operation `epoch` until `word`, which only `peer` writes, is at least `goal`.
__device__ inline bool wait_for_goal(const KernelContext& ctx, Phase phase, int peer,
                                     std::uint64_t epoch, const std::uint64_t* word,
                                     std::uint64_t goal) {
  return wait_until(ctx, phase, peer, epoch, [&] { return load_acquire(word) >= goal; });
}

// The same where the goal is the operation itself.
__device__ inline bool wait_for(const KernelContext& ctx, Phase phase, int peer,
                                const std::uint64_t* word, std::uint64_t epoch) {
  return wait_for_goal(ctx, phase, peer, epoch, word, epoch);
}

// A number and its value in one word: the lower 31 bits of the number above the 32 bits of the
// value.  The highest bit is set, so a word of a new window, which is zero, carries no number.
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

// The value that `peer` posted with `number` in the operation `epoch`; -1 when the group has
// failed. With kLoad = load_acquire, everything it wrote before is visible too.
template <std::uint64_t (*kLoad)(const std::uint64_t*) = load_relaxed>
__device__ std::int64_t wait_for_numbered(const KernelContext& ctx, Phase phase, int peer,
                                          std::uint64_t epoch, const std::uint64_t* word,
                                          std::uint64_t number) {
  std::uint64_t found = 0;
  const bool arrived = wait_until(ctx, phase, peer, epoch, [&] {
    found = kLoad(word);
    return has_number(found, number);
  });
  return arrived ? static_cast<std::int64_t>(found & 0xffffffffu) : -1;
}

// The word in this rank's control window that `peer` writes for `signal`.
__device__ inline std::uint64_t* signal_word(char* control, const Control& layout, Signal signal,
                                             int peer) {
  return reinterpret_cast<std::uint64_t*>(control + layout.signals()) + signal * layout.num_ranks +
         peer;
}

// Words in shared memory that one thread of a CTA writes and other warps poll; callers order other
// data with fences.  Accesses are atomic so that compute-sanitizer does not report them as races.
__device__ inline void show(int* word, int value) { atomicExch(word, value); }
__device__ inline int look(int* word) { return atomicAdd(word, 0); }

// A barrier for all threads of all CTAs; the grid must be resident (a cooperative launch).  What
// was written before it is visible after it.  False, for the whole CTA, when the group has failed:
// what the other CTAs should have written may be missing.
__device__ inline bool grid_barrier(const KernelContext& ctx, Phase phase) {
  bool all_here = true;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned int arrival = atomicAdd(&ctx.state->arrived, 1u);
    const unsigned int goal = (arrival / gridDim.x + 1) * gridDim.x;
    all_here = wait_until(ctx, phase, ctx.rank, current_epoch(ctx), [&] {
      return *static_cast<volatile unsigned int*>(&ctx.state->arrived) >= goal;
    });
    __threadfence();
  }
  return __syncthreads_and(all_here);
}

// Whether the group had failed before this kernel, which then moves no data and signals no rank.
// All threads of a CTA call it; it is a barrier of the CTA.
__device__ inline bool had_failed(const KernelContext& ctx) {
  return __syncthreads_or(threadIdx.x == 0 && has_failed(ctx));
}

// Fills an output of a failed kernel with NaN: bf16, fp16 and fp32 are NaN when all bits are set.
// Called by one CTA; `memory` is aligned to 16 bytes, or null when there is none.
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

// All threads call this last.  True for all threads of the CTA that leaves last; everything that
// the others wrote is visible to it, and through its releases to other ranks.
__device__ inline bool leave(const KernelContext& ctx) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    // One fence for all threads: it also orders what this thread has seen of the others.
    __threadfence_system();
    is_last = atomicAdd(&ctx.state->leaving, 1u) == gridDim.x - 1;
    if (is_last) ctx.state->arrived = ctx.state->leaving = ctx.state->next = 0;
    __threadfence_system();
  }
  __syncthreads();
  return is_last;
}

}  // namespace ncclep::native
