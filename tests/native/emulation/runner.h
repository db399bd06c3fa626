// What one rank does on the emulator, held against the oracle (routing.h).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "common/dtype.h"
#include "memory.h"
#include "native/plan/plan.h"
#include "native/state.h"
#include "routing.h"

// CTAs that a kernel has at most.
constexpr int kSms = 8;

// The memory that the ranks of a group have, all of them.
class World {
 public:
  explicit World(const Sizes& sizes);
  ~World();

  // What `rank`'s kernels get.
  ncclep::native::KernelContext of(int rank) const;
  ncclep::native::State& state(int rank) { return states_[rank]; }
  const ncclep::native::Mailbox& mailbox(int rank) const { return mailboxes_[rank]; }
  // The bytes of all windows but those of `rank`.
  std::vector<std::vector<char>> windows_but_of(int rank);

 private:
  ncclep::native::KernelContext shared_{};
  std::deque<Memory> control_, rows_;
  mutable std::deque<ncclep::native::State> states_;
  mutable std::deque<ncclep::native::Mailbox> mailboxes_;
};

// A plan, dispatch or combine, as all ranks make it.
struct Step {
  enum Kind { kPlan, kDispatch, kCombine } kind;
  int number, plan;  // in the sequence; among its plans
  int row_bytes, phases, sms;
  ncclep::DType dtype;
  bool has_weights;
  // In what a rank that is in another call differs: the phase, the dtype, the row's length, the
  // weights, a bit of the plan's number; or, in a plan, modulo 3: top-k, the alignment, the limit.
  int other;
};

// One rank, with a plan of each routing.  What a kernel delivers is checked as soon as it is over:
// all of it is NaN when the rank's group has failed.
class Runner {
 public:
  Runner(const ncclep::native::KernelContext& me, const Sizes& sizes,
         const std::vector<Routing>& routings)
      : me_(me),
        sizes_(sizes),
        routings_(routings),
        plans_(routings.size()),
        lacked_(8 * sizes.ranks, 0),
        most_lacked_(sizes.ranks, 0),
        ticket_(sizes.starts.tickets) {}

  // Does nothing when there is no plan for it.
  void run(const Step& step);
  // The plan of routing `number` can be used.
  bool has_plan(int number) const { return plans_[number].is_made; }

  // Tells the others that this rank goes no further.
  void refuse();

  // What the ranks have alike in a step, if their hosts do not agree on it; or another call.
  std::uint64_t call_of(const Step& step, bool is_other) const;

  // Called before each kernel.
  std::function<void()> before_kernel = [] {};
  // Whether this rank is in another call than the others, in the step that follows.
  bool differs = false;

 private:
  struct Plan {
    bool is_made = false;
    std::optional<Memory> named, counts, token_routes, routes;
    ncclep::native::ReceivedRoutes received{};
  };

  void plan(const Step& step);
  void check_routes(const Plan& plan, const Routing& routing);
  void dispatch(const Step& step);
  void combine(const Step& step);

  bool has_failed() const { return me_.state->failed != 0; }
  void launch(const std::function<void()>& queue);
  ncclep::native::TokenRoutes token_routes_of(Plan& plan, int num_tokens);
  void receive(Plan& plan, const Routing& routing, std::int64_t pairs, std::int64_t assignments,
               const ncclep::native::PlanScratch& scratch, int sms);

  ncclep::native::KernelContext me_;
  const Sizes& sizes_;
  const std::vector<Routing>& routings_;
  std::vector<Plan> plans_;
  Memory lacked_;                          // what plans write
  std::vector<std::int64_t> most_lacked_;  // what it should be
  std::uint32_t ticket_, bad_ranks_ = 0;
};
