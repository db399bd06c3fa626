// Combine's sums over several NVLink domains.
//
// The ranks of a domain have sent their sums for a token to its source or, if that is in another
// domain, to its rail peer in theirs.  That rank adds them up, its own rows unrounded, and the sum,
// rounded, is the domain's.  Those of node tokens are put to their source phase by phase, as
// dispatch has put the rows (rails/phases.cuh).  The source adds up the domains' sums in order.
//
// Every warp first takes part in the sums of the domain, and only then in those over domains: these
// wait for other ranks, whose sums may wait for the former.  With rounds (rails/rounds.cuh) it
// makes the domain's sums of the next round before those over domains, which wait for the network.
//
// Why nothing is overwritten that is still needed, by another combine: what a rank sends or puts to
// another one, and what it, or another rank of its domain, prepares to be put there, is written
// only when that rank has entered this combine, and so has left the previous one, with everything
// that was put to it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/call_barrier.cuh"
#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/device/work_counter.cuh"
#include "native/rails/phases.cuh"
#include "native/rank_set.cuh"
#include "native/rows/combine.h"
#include "native/rows/reduce_rows.cuh"
#include "native/rows/send.cuh"

namespace ncclep::native {

// Where the values for assignments of `source` are sent to.
template <typename R>
__device__ float* values_for(const KernelContext& ctx, int source) {
  if constexpr (R::kEnabled) {
    if (!is_local(ctx, source)) {
      return reinterpret_cast<float*>(ctx.control_of[host_of(ctx, source)] +
                                      RailLayout{ctx.control}.sent_values()) +
             ctx.control.domain_of(source) * ctx.control.assignments();
    }
  }
  return reinterpret_cast<float*>(ctx.control_of[source] + ctx.control.values());
}

// The sums that this rank makes for `domain` before the phase that begins at `token`: of its own
// tokens, or of node tokens.
__device__ inline int sums_before(const KernelContext& ctx, const Combine& job, int domain,
                                  int token) {
  if (domain == ctx.control.domain_of(ctx.rank)) return min(token, job.num_tokens);
  return job.rail_routes.num_before(rail_peer_in(ctx, domain), token);
}

// Sums of a phase of a round that are done, counted by warps of this rank.
__device__ inline unsigned int* num_summed(const KernelContext& ctx, const Round& round, int domain,
                                           int phase) {
  return reinterpret_cast<unsigned int*>(ctx.control_of[ctx.rank] +
                                         RailLayout{ctx.control}.num_summed()) +
         domain * ctx.control.max_phases() + round.number * round.num_phases + phase;
}

template <typename R>
__device__ bool are_summed(const KernelContext& ctx, const Combine& job, const Round& round,
                           int domain, int phase) {
  const int goal = sums_before(ctx, job, domain, phase_start<R>(round, phase + 1)) -
                   sums_before(ctx, job, domain, phase_start<R>(round, phase));
  return static_cast<int>(atomicAdd(num_summed(ctx, round, domain, phase), 0u)) >= goal;
}

// Waits for warps of this rank, whose waits have deadlines.
template <typename IsOver>
__device__ bool wait_for_warps(const KernelContext& ctx, IsOver&& is_over) {
  while (!is_over()) {
    if (has_failed(ctx)) return false;
  }
  __threadfence();
  return true;
}

// The items of a round's sums over domains.
__device__ inline int num_added(const Round& round) { return max(1, round.end - round.begin); }

__device__ inline bool are_added(const KernelContext& ctx, const Round& round) {
  const unsigned int number = atomicAdd(num_done(ctx, kAddingDomains, round.number), 0u);
  return static_cast<int>(number) >= num_added(round);
}

// Not inlined: puts are few, and would take registers from all sums.
template <typename R>
__device__ __noinline__ bool put_apart(const KernelContext& ctx, const R& rails,
                                       std::uint64_t epoch, RailWindow window, int domain,
                                       std::size_t to, std::size_t from, std::size_t num_bytes,
                                       RailSignal signal) {
  return put(ctx, rails, Phase::kCombine, epoch, window, domain, to, from, num_bytes, signal);
}

// Puts the sums of node tokens to the rail peers, phase by phase, and waits for all of theirs.
// Called by one warp.
template <typename R>
__device__ void put_sums(const KernelContext& ctx, const R& rails, const Combine& job,
                         std::uint64_t epoch) {
  const Control& layout = ctx.control;
  const RailLayout there{layout};
  const RailSums sums = rail_sums(ctx);
  const int own = layout.domain_of(ctx.rank), num_phases = num_phases_in(job),
            num_units = num_rounds_of(job) * num_phases;
  bool are_put = true;
  const auto is_ready = [&](int domain, int unit) {
    return are_summed<R>(ctx, job, round_of(job, unit / num_phases), domain, unit % num_phases);
  };
  const auto put_unit = [&](int domain, int unit) {
    fence_system();
    const Round round = round_of(job, unit / num_phases);
    const int phase = unit % num_phases;
    const int start = phase_start<R>(round, phase), end = phase_start<R>(round, phase + 1);
    if (job.has_weights && end > start) {
      const std::size_t row = 4 * layout.assignments(), first = std::size_t{4} * start * job.top_k;
      are_put = are_put && put_apart(ctx, rails, epoch, kControlWindow, domain,
                                     there.values() + own * row + first,
                                     there.sent_values() + domain * row + first,
                                     std::size_t{4} * (end - start) * job.top_k, kNumRailSignals);
    }
    const int before = sums_before(ctx, job, domain, start);
    const std::size_t number = sums_before(ctx, job, domain, end) - before;
    const std::size_t at =
        std::size_t{1} * (before - sums_before(ctx, job, domain, round.begin)) * job.row_bytes;
    are_put =
        are_put &&
        put_apart(ctx, rails, epoch, kRowsWindow, domain, sums.of_domain(round.number, own) + at,
                  sums.sent(round.number, own, domain) + at, number * job.row_bytes, kSumsPut);
  };
  for_units(ctx, num_units, is_ready, put_unit, [&](int) { return !are_put || has_failed(ctx); });
  for (int domain = threadIdx.x % kWarpSize; domain < layout.num_domains; domain += kWarpSize) {
    if (!has_rail_peer(ctx, domain)) continue;
    wait_for_signal(ctx, rails, Phase::kCombine, kSumsPut, domain, num_units, epoch);
  }
}

// Tells the rail peers of each round whose sums over domains are made, so that those of the next
// but one may be put.  Called by one warp.
template <typename R>
__device__ void pass_sums_on(const KernelContext& ctx, const R& rails, const Combine& job,
                             std::uint64_t epoch) {
  for (int number = 0; number + 2 < num_rounds_of(job); ++number) {
    const Round round = round_of(job, number);
    bool is_over = wait_for_warps(ctx, [&] { return are_added(ctx, round); });
    for (int domain = threadIdx.x % kWarpSize; domain < ctx.control.num_domains && is_over;
         domain += kWarpSize) {
      if (!has_rail_peer(ctx, domain)) continue;
      is_over = put_apart(ctx, rails, epoch, kControlWindow, domain, 0, 0, 0, kAddedUpPut);
    }
    if (!__all_sync(~0u, is_over)) return;
  }
}

// The work of one warp.  `parts` is its own, for a pointer of each lane.
template <typename R>
class DomainSums {
 public:
  __device__ DomainSums(const KernelContext& ctx, const R& rails, const Combine& job,
                        const char** parts, std::uint64_t epoch)
      : ctx_(ctx),
        rails_(rails),
        job_(job),
        parts_(parts),
        epoch_(epoch),
        sums_(rail_sums(ctx)),
        window_(ctx.rows_of[ctx.rank]),
        own_(ctx.control.domain_of(ctx.rank)),
        counter_(ctx) {}

  // Goes to the sums of this domain's ranks in a round, once there is room for them: those over
  // domains of the last round but one are made, here and by the rail peers.  False when the group
  // has failed.
  __device__ bool begin_of_domain(const Round& round) {
    bool is_free = true;
    if (round.number > 1) {
      const Round before = round_of(job_, round.number - 2);
      is_free = wait_for_warps(ctx_, [&] { return are_added(ctx_, before); });
      for (int domain = threadIdx.x % kWarpSize; domain < ctx_.control.num_domains && is_free;
           domain += kWarpSize) {
        if (!has_rail_peer(ctx_, domain)) continue;
        is_free = wait_for_signal(ctx_, rails_, Phase::kCombine, kAddedUpPut, domain,
                                  round.number - 1, epoch_);
      }
    }
    begin(round, max(1, (round.end - round.begin) * ctx_.control.num_domains));
    return __all_sync(~0u, is_free);
  }

  // Tells that this warp's share is done, which made room for sums of ranks.
  __device__ void end_of_domain() {
    if (count(kAddingRanks) && threadIdx.x % kWarpSize == 0) {
      tell_of_round(ctx_, true, round_.number, epoch_);
    }
  }

  // Whether parts will not come: then there is no next round for this warp.
  __device__ bool has_given_up() const { return has_given_up_; }

  // The same for the sums over domains.
  __device__ void begin_of_all(const Round& round) { begin(round, num_added(round)); }
  __device__ void end_of_all() { count(kAddingDomains); }

  // The sum of this domain's ranks for the next token that no other warp has taken: domains take
  // turns, so that all phases make progress.
  __device__ bool next_of_domain(Sum* sum) {
    const int lane = threadIdx.x % kWarpSize, num_domains = ctx_.control.num_domains;
    int domain, token;
    do {
      const int item = take();
      if (item < 0) return false;
      domain = (own_ + 1 + item % num_domains) % num_domains;
      token = round_.begin + item / num_domains;
    } while (!has_sum(domain, token));
    if (lane == 0)
      begun_[num_begun_ % kNotes] = num_summed(ctx_, round_, domain, phase_of<R>(round_, token));
    ++num_begun_;

    const ReceivedRoutes& routes = job_.routes;
    const int own_rank = ctx_.control.local_rank_of(ctx_.rank);
    RankSet ranks;
    int first = 0, own_rows = 0;
    if (domain == own_) {
      ranks = rank_sets(job_.token_routes.token_ranks)[token];
      own_rows = __popc(job_.token_routes.own_assignments[token]);
      first = routes.pair_first[routes.first_pair[ctx_.rank]] + job_.token_routes.own_first[token];
    } else {
      const std::int64_t node = std::int64_t{domain} * job_.rail_routes.most_tokens + token;
      ranks = rank_sets(job_.rail_routes.ranks_of)[node];
      if (has_rank(ranks, own_rank)) {
        const int pair = job_.rail_routes.own_pair[node];
        first = routes.pair_first[pair];
        own_rows = routes.pair_first[pair + 1] - first;
      }
    }
    const int source = rail_peer_in(ctx_, domain), rank = rank_at(ctx_, lane);
    const RankSet others = ranks & ~one_rank(own_rank);
    bool is_part[kRankGroups], arrived = true;  // of this lane's rank of each group
#pragma unroll
    for (int group = 0; group < kRankGroups; ++group) {
      const int other = rank + group * kWarpSize;
      is_part[group] = word_of(others, group) >> lane & 1;
      arrived =
          arrived && (!is_part[group] ||
                      wait_for(ctx_, Phase::kCombine, other,
                               pushed_flags<R>(ctx_, source, other) + token / kChunk, epoch_));
    }
    if (!__all_sync(~0u, arrived)) return give_up();
    // In the order of ranks; this rank's own rows first where only one part is before them.
    const int parts_before = number_of(others & ranks_before(own_rank));
    const int own_first = parts_before < 2 ? 0 : parts_before;
#pragma unroll
    for (int group = 0; group < kRankGroups; ++group) {
      if (!is_part[group]) continue;
      const int other = group * kWarpSize + lane, before = number_of(others & ranks_before(other));
      parts_[before + (own_first == 0 || other > own_rank ? own_rows : 0)] =
          address_of_sum<R>(ctx_, job_, round_, source, token, rank + group * kWarpSize);
    }
    if (lane < own_rows) {
      const int slot = routes.assignment_slot[first + lane];
      parts_[own_first + lane] = job_.y + static_cast<std::size_t>(slot) * job_.row_bytes;
      if (job_.has_weights) {
        const int index = routes.assignment_index[first + lane];
        float* values = domain == own_ ? job_.topk_w : values_for<R>(ctx_, source);
        values[index] = job_.w[slot];
      }
    }
    __syncwarp();
    sum->row = parts_[lane];
    __syncwarp();
    sum->num_rows = number_of(others) + own_rows;
    sum->part_begin = own_first;
    sum->part_end = own_first + (own_first == 0 || own_rows == 1 ? 0 : own_rows);
    const std::size_t row = row_in_round<R>(ctx_, job_.rail_routes, round_, source, token);
    sum->out = window_ +
               (domain == own_ ? sums_.of_domain(round_.number, own_)
                               : sums_.sent(round_.number, own_, domain)) +
               row * job_.row_bytes;
    return true;
  }

  // The oldest sum of `next_of_domain` is stored.
  __device__ void record_sum() {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      unsigned int* const number = begun_[num_stored_ % kNotes];
      __threadfence();
      atomicAdd(number, 1u);
    }
    ++num_stored_;
  }

  // The sum over domains for this rank's next token.
  __device__ bool next_of_all(Sum* sum) {
    const int lane = threadIdx.x % kWarpSize, end = min(round_.end, job_.num_tokens);
    int item, token;
    do {
      item = take();
      if (item < 0) return false;
      token = round_.begin + item;
    } while (token >= end);
    const RailRoutes& routes = job_.rail_routes;
    int num_parts = 0;  // a token has at most as many domains as assignments
    for (int first = 0; first < ctx_.control.num_domains; first += kWarpSize) {
      const int domain = first + lane;
      int sum_index = -1;  // of the domain's sum in the round
      if (domain == own_) {
        if (rank_sets(job_.token_routes.token_ranks)[token]) sum_index = token - round_.begin;
      } else if (domain < ctx_.control.num_domains) {
        sum_index = routes.node_of[std::int64_t{domain} * routes.num_tokens + token];
        if (sum_index >= 0) sum_index -= routes.num_sent(domain, round_.begin);
      }
      bool arrived = true;
      if (sum_index >= 0) {
        const int phase = phase_of<R>(round_, token);
        const auto are_here = [&] { return are_summed<R>(ctx_, job_, round_, own_, phase); };
        arrived = domain == own_ ? wait_for_warps(ctx_, are_here)
                                 : wait_for_signal(ctx_, rails_, Phase::kCombine, kSumsPut, domain,
                                                   number_of_phase<R>(round_, phase) + 1, epoch_);
      }
      if (!__all_sync(~0u, arrived)) return give_up();
      const std::uint32_t domains = __ballot_sync(~0u, sum_index >= 0);
      if (sum_index >= 0) {
        parts_[num_parts + __popc(domains & ((1u << lane) - 1))] =
            window_ + sums_.of_domain(round_.number, domain) +
            static_cast<std::size_t>(sum_index) * job_.row_bytes;
      }
      num_parts += __popc(domains);
    }
    __syncwarp();
    sum->row = parts_[lane];
    __syncwarp();
    sum->num_rows = num_parts;
    sum->part_begin = sum->part_end = 0;
    sum->out = job_.out + static_cast<std::size_t>(token) * job_.row_bytes;
    if (job_.has_weights && lane < job_.top_k) give_value(token, lane);
    return true;
  }

 private:
  __device__ bool give_up() {
    has_given_up_ = true;
    return false;
  }

  __device__ void begin(const Round& round, int num_items) {
    round_ = round;
    first_item_ = end_item_;
    end_item_ += num_items;
    num_taken_ = 0;
  }

  // The next item of these sums that no other warp has taken, from 0; -1: there is none.
  __device__ int take() {
    if (has_given_up_) return -1;
    if (!is_taken_) item_ = counter_.take();
    is_taken_ = item_ >= end_item_;
    if (is_taken_) return -1;
    ++num_taken_;
    return item_ - first_item_;
  }

  // Counts what this warp has taken.  True for the warp that counts the last of it.
  __device__ bool count(RoundPart part) const {
    return count_done(ctx_, part, round_.number, num_taken_, end_item_ - first_item_);
  }

  // Whether this rank makes a sum for `domain` of a token, or of a node token that may have this
  // name.
  __device__ bool has_sum(int domain, int token) const {
    if (domain == own_) return token < job_.num_tokens;
    const int source = rail_peer_in(ctx_, domain), chunk = token / kChunk * kChunk;
    return token - chunk < job_.rail_routes.num_before(source, chunk + kChunk) -
                               job_.rail_routes.num_before(source, chunk);
  }

  // Returns the value of the `k`-th assignment, unless it is this rank's own: that one is there.
  __device__ void give_value(int token, int k) const {
    const Control& layout = ctx_.control;
    const RailRoutes& routes = job_.rail_routes;
    if (job_.token_routes.own_assignments[token] >> k & 1) return;
    const char* window = ctx_.control_of[ctx_.rank];
    const int index = token * job_.top_k + k;
    float value = 0;
    if (job_.token_routes.token_assignments[token] >> k & 1) {
      value = __ldcg(reinterpret_cast<const float*>(window + layout.values()) + index);
      for (int domain = 0; domain < layout.num_domains; ++domain) {
        const std::int64_t row = std::int64_t{domain} * routes.num_tokens + token;
        if (domain == own_ || !(routes.sent_assignments[row] >> k & 1)) continue;
        value = __ldcg(reinterpret_cast<const float*>(window + RailLayout{layout}.values()) +
                       domain * layout.assignments() + index);
      }
    }
    job_.topk_w[index] = value;
  }

  const KernelContext& ctx_;
  const R& rails_;
  const Combine& job_;
  Round round_{};
  const char** parts_;
  const std::uint64_t epoch_;
  const RailSums sums_;
  char* window_;
  const int own_;
  WorkCounter counter_;
  int first_item_ = 0, end_item_ = 0, num_taken_ = 0;  // of these sums
  int item_ = 0;                                       // the last that was taken
  bool is_taken_ = false;                              // it is of those that follow
  bool has_given_up_ = false;
  unsigned int num_begun_ = 0, num_stored_ = 0;
  unsigned int* begun_[kNotes];  // lane 0: what counts the sums that are begun
};

// Called by one warp.
template <typename T, typename R, typename Ring>
__device__ void sum_over_domains(const KernelContext& ctx, const R& rails, const Combine& job,
                                 Ring& ring, const char** parts, std::uint64_t entry,
                                 std::uint64_t epoch) {
  bool entered = true;
  for (int domain = threadIdx.x % kWarpSize; domain < ctx.control.num_domains && entered;
       domain += kWarpSize) {
    if (!has_rail_peer(ctx, domain)) continue;
    entered = wait_for_entry(ctx, Phase::kCombine, rail_peer_in(ctx, domain), entry, epoch) != 0;
  }
  if (!__all_sync(~0u, entered)) return;
  DomainSums<R> sums(ctx, rails, job, parts, epoch);
  const auto next_of_domain = [&](Sum* sum) { return sums.next_of_domain(sum); };
  const auto next_of_all = [&](Sum* sum) { return sums.next_of_all(sum); };
  const int num_rounds = num_rounds_of(job);
  for (int number = 0; number <= num_rounds && !sums.has_given_up(); ++number) {
    if (number < num_rounds) {
      if (!sums.begin_of_domain(round_of(job, number))) return;
      reduce_rows<T, true>(ring, job.row_bytes, next_of_domain, [&] { sums.record_sum(); });
      sums.end_of_domain();
      __syncwarp();  // the ring is used again
    }
    if (number > 0 && !sums.has_given_up()) {
      sums.begin_of_all(round_of(job, number - 1));
      reduce_rows<T, false>(ring, job.row_bytes, next_of_all, [] {});
      sums.end_of_all();
      __syncwarp();
    }
  }
}

}  // namespace ncclep::native
