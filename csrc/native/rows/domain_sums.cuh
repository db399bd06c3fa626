// Combine's sums over several NVLink domains.
//
// The ranks of a domain have sent their sums for a token to its source or, if that is in another
// domain, to its rail peer in theirs.  That rank adds them up, its own rows unrounded, and the sum,
// rounded, is the domain's.  Those of node tokens are put to their source phase by phase, as
// dispatch has put the rows (rails/phases.cuh).  The source adds up the domains' sums in order.
//
// Every warp first takes part in the sums of the domain, and only then in those over domains: these
// wait for other ranks, whose sums may wait for the former.
//
// Why nothing is overwritten that is still needed: what a rank sends or puts to another one, and
// what it, or another rank of its domain, prepares to be put there, is written only when that rank
// has entered this combine, and so has left the previous one, with everything that was put to it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "native/device/call_barrier.cuh"
#include "native/device/rails.cuh"
#include "native/device/wait.cuh"
#include "native/device/work_counter.cuh"
#include "native/rails/phases.cuh"
#include "native/rows/combine.h"
#include "native/rows/reduce_rows.cuh"
#include "native/rows/send.cuh"

namespace ncclep::native {

// Where the values for assignments of `source` are sent to, and the place there of the one with
// this index.
template <typename R>
__device__ float* values_for(const KernelContext& me, int source) {
  if constexpr (R::kAreThere) {
    if (!is_local(me, source)) {
      return reinterpret_cast<float*>(me.control_of[host_of(me, source)] +
                                      RailLayout{me.control}.sent_values()) +
             me.control.domain_of(source) * me.control.assignments();
    }
  }
  return reinterpret_cast<float*>(me.control_of[source] + me.control.values());
}

// The sums that this rank makes for `domain` before the phase that begins at `token`: of its own
// tokens, or of node tokens.
__device__ inline int sums_before(const KernelContext& me, const Combine& job, int domain,
                                  int token) {
  if (domain == me.control.domain_of(me.rank)) return min(token, job.num_tokens);
  return job.rail_routes.num_before(rail_peer_in(me, domain), token);
}

// Waits until the sums of a phase are done, by warps of this rank: those have deadlines.
template <typename R>
__device__ bool wait_for_sums(const KernelContext& me, const Combine& job, int domain, int phase) {
  const int goal = sums_before(me, job, domain, phase_start<R>(job, phase + 1)) -
                   sums_before(me, job, domain, phase_start<R>(job, phase));
  while (static_cast<int>(atomicAdd(&me.state->summed[domain][phase], 0u)) < goal) {
    if (has_failed(me)) return false;
  }
  __threadfence();
  return true;
}

// Puts the sums of node tokens to the rail peers, phase by phase, and waits for all of theirs.
// Called by one warp.
template <typename R>
__device__ void put_sums(const KernelContext& me, const R& rails, const Combine& job,
                         std::uint64_t epoch) {
  const Control& layout = me.control;
  const RailLayout there{layout};
  const RailSums sums = rail_sums(me);
  const int lane = threadIdx.x % kWarpSize, own = layout.domain_of(me.rank);
  for (int phase = 0; phase < job.num_phases; ++phase) {
    for (int domain = lane; domain < layout.num_domains; domain += kWarpSize) {
      if (!has_rail_peer(me, domain)) continue;
      if (!wait_for_sums<R>(me, job, domain, phase)) return;
      fence_system();
      const int start = phase_start<R>(job, phase), end = phase_start<R>(job, phase + 1);
      if (job.has_weights && end > start) {
        const std::size_t row = 4 * layout.assignments(), first = std::size_t{4} * start * job.top_k;
        if (!put(me, rails, Phase::kCombine, epoch, kControlWindow, domain,
                 there.values() + own * row + first, there.sent_values() + domain * row + first,
                 std::size_t{4} * (end - start) * job.top_k)) {
          return;
        }
      }
      const int before = sums_before(me, job, domain, start);
      const std::size_t number = sums_before(me, job, domain, end) - before;
      const std::size_t at =
          std::size_t{1} * (before - sums_before(me, job, domain, job.begin)) * job.row_bytes;
      if (!put(me, rails, Phase::kCombine, epoch, kRowsWindow, domain, sums.of_domain(own) + at,
               sums.sent(own, domain) + at, number * job.row_bytes, kSumsPut)) {
        return;
      }
    }
  }
  for (int domain = lane; domain < layout.num_domains; domain += kWarpSize) {
    if (!has_rail_peer(me, domain)) continue;
    wait_for_signal(me, rails, Phase::kCombine, kSumsPut, domain, job.num_phases, epoch);
  }
}

// The work of one warp.  `parts` is its own, for a pointer of each lane.
template <typename R>
class DomainSums {
 public:
  __device__ DomainSums(const KernelContext& me, const R& rails, const Combine& job,
                        const char** parts, std::uint64_t epoch)
      : me_(me),
        rails_(rails),
        job_(job),
        parts_(parts),
        epoch_(epoch),
        sums_(rail_sums(me)),
        window_(me.rows_of[me.rank]),
        own_(me.control.domain_of(me.rank)),
        num_items_((job.end - job.begin) * me.control.num_domains),
        counter_(me) {}

  // The sum of this domain's ranks for the next token that no other warp has taken: domains take
  // turns, so that all phases make progress.
  __device__ bool next_of_domain(Sum* sum) {
    const int lane = threadIdx.x % kWarpSize, num_domains = me_.control.num_domains;
    int item, domain, token;
    do {
      item = counter_.take();
      if (item >= num_items_) {
        item_ = item;
        return false;
      }
      domain = (own_ + 1 + item % num_domains) % num_domains;
      token = job_.begin + item / num_domains;
    } while (!has_sum(domain, token));
    if (lane == 0) begun_[num_begun_ % kNotes] = domain * kPhases + phase_of<R>(job_, token);
    ++num_begun_;

    const ReceivedRoutes& routes = job_.routes;
    const int place = me_.control.place_of(me_.rank);
    std::uint32_t ranks;
    int first = 0, own_rows = 0;
    if (domain == own_) {
      ranks = job_.token_routes.token_ranks[token];
      own_rows = __popc(job_.token_routes.own_assignments[token]);
      first = routes.pair_first[routes.first_pair[me_.rank]] + job_.token_routes.own_first[token];
    } else {
      const std::int64_t node = std::int64_t{domain} * job_.rail_routes.most_tokens + token;
      ranks = job_.rail_routes.ranks_of[node];
      if (ranks >> place & 1) {
        const int pair = job_.rail_routes.own_pair[node];
        first = routes.pair_first[pair];
        own_rows = routes.pair_first[pair + 1] - first;
      }
    }
    const int source = rail_peer_in(me_, domain), rank = local_rank(me_, lane);
    const std::uint32_t others = ranks & ~(1u << place);
    const bool is_part = others >> lane & 1;
    const bool is_here =
        !is_part || wait_for(me_, Phase::kCombine, rank,
                             pushed_flags<R>(me_, source, rank) + token / kChunk, epoch_);
    if (!__all_sync(~0u, is_here)) return give_up();
    // In the order of ranks; this rank's own rows first where only one part is before them.
    const int parts_before = __popc(others & ((1u << place) - 1));
    const int own_first = parts_before < 2 ? 0 : parts_before;
    if (is_part) {
      const int before = __popc(others & ((1u << lane) - 1));
      parts_[before + (own_first == 0 || lane > place ? own_rows : 0)] =
          place_of_sum<R>(me_, job_, source, token, rank);
    }
    if (lane < own_rows) {
      const int slot = routes.assignment_slot[first + lane];
      parts_[own_first + lane] = job_.y + static_cast<std::size_t>(slot) * job_.row_bytes;
      if (job_.has_weights) {
        const int index = routes.assignment_index[first + lane];
        float* values = domain == own_ ? job_.topk_w : values_for<R>(me_, source);
        values[index] = job_.w[slot];
      }
    }
    __syncwarp();
    sum->row = parts_[lane];
    __syncwarp();
    sum->num_rows = __popc(others) + own_rows;
    sum->part_begin = own_first;
    sum->part_end = own_first + (own_first == 0 || own_rows == 1 ? 0 : own_rows);
    const std::size_t row = place_in_round<R>(me_, job_, source, token);
    sum->out = window_ + (domain == own_ ? sums_.of_domain(own_) : sums_.sent(own_, domain)) +
               row * job_.row_bytes;
    return true;
  }

  // The oldest sum of `next_of_domain` is stored.
  __device__ void count() {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      const int of = begun_[num_done_ % kNotes];
      __threadfence();
      atomicAdd(&me_.state->summed[of / kPhases][of % kPhases], 1u);
    }
    ++num_done_;
  }

  // The sum over domains for this rank's next token.
  __device__ bool next_of_all(Sum* sum) {
    const int lane = threadIdx.x % kWarpSize;
    const int token = job_.begin + (item_ >= 0 ? item_ : counter_.take()) - num_items_;
    item_ = -1;
    if (token >= min(job_.end, job_.num_tokens)) return false;
    const RailRoutes& routes = job_.rail_routes;
    int num_parts = 0;  // a token has at most as many domains as assignments
    for (int first = 0; first < me_.control.num_domains; first += kWarpSize) {
      const int domain = first + lane;
      int place = -1;  // of the domain's sum in the round
      if (domain == own_) {
        if (job_.token_routes.token_ranks[token] != 0) place = token - job_.begin;
      } else if (domain < me_.control.num_domains) {
        place = routes.node_of[std::int64_t{domain} * routes.num_tokens + token];
        if (place >= 0) place -= routes.num_sent(domain, job_.begin);
      }
      bool is_here = true;
      if (place >= 0) {
        const int phase = phase_of<R>(job_, token);
        is_here = domain == own_ ? wait_for_sums<R>(me_, job_, own_, phase)
                                 : wait_for_signal(me_, rails_, Phase::kCombine, kSumsPut, domain,
                                                   phase + 1, epoch_);
      }
      if (!__all_sync(~0u, is_here)) return false;
      const std::uint32_t domains = __ballot_sync(~0u, place >= 0);
      if (place >= 0) {
        parts_[num_parts + __popc(domains & ((1u << lane) - 1))] =
            window_ + sums_.of_domain(domain) + static_cast<std::size_t>(place) * job_.row_bytes;
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
  // Whether this rank makes a sum for `domain` of a token, or of a node token that may have this
  // name.
  __device__ bool has_sum(int domain, int token) const {
    if (domain == own_) return token < job_.num_tokens;
    const int source = rail_peer_in(me_, domain), chunk = token / kChunk * kChunk;
    return token - chunk < job_.rail_routes.num_before(source, chunk + kChunk) -
                               job_.rail_routes.num_before(source, chunk);
  }

  // Returns the value of the `k`-th assignment, unless it is this rank's own: that one is there.
  __device__ void give_value(int token, int k) const {
    const Control& layout = me_.control;
    const RailRoutes& routes = job_.rail_routes;
    if (job_.token_routes.own_assignments[token] >> k & 1) return;
    const char* window = me_.control_of[me_.rank];
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

  __device__ bool give_up() {
    item_ = num_items_ + job_.end - job_.begin;
    return false;
  }

  const KernelContext& me_;
  const R& rails_;
  const Combine& job_;
  const char** parts_;
  const std::uint64_t epoch_;
  const RailSums sums_;
  char* window_;
  const int own_;
  const int num_items_;  // of the first kind; those of the second follow
  WorkCounter counter_;
  int item_ = -1;  // one of the second kind that is taken
  unsigned int num_begun_ = 0, num_done_ = 0;
  int begun_[kNotes];  // lane 0: the phases of sums that are begun
};

// Called by one warp.
template <typename T, typename R, typename Ring>
__device__ void sum_over_domains(const KernelContext& me, const R& rails, const Combine& job,
                                 Ring& ring, const char** parts, std::uint64_t entry,
                                 std::uint64_t epoch) {
  bool has_entered = true;
  for (int domain = threadIdx.x % kWarpSize; domain < me.control.num_domains && has_entered;
       domain += kWarpSize) {
    if (!has_rail_peer(me, domain)) continue;
    has_entered = wait_for_entry(me, Phase::kCombine, rail_peer_in(me, domain), entry, epoch) != 0;
  }
  if (!__all_sync(~0u, has_entered)) return;
  DomainSums<R> sums(me, rails, job, parts, epoch);
  const auto next_of_domain = [&](Sum* sum) { return sums.next_of_domain(sum); };
  const auto next_of_all = [&](Sum* sum) { return sums.next_of_all(sum); };
  add_up<T, true>(ring, job.row_bytes, next_of_domain, [&] { sums.count(); });
  __syncwarp();  // the ring is used again
  add_up<T, false>(ring, job.row_bytes, next_of_all, [] {});
}

}  // namespace ncclep::native
