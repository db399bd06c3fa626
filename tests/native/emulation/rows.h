// Sequences of plans, dispatches and combines.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "native/plan/plan.h"
#include "sequence.h"

class Rows : public Sequence {
 public:
  Rows(const Kind& kind, const Sizes& sizes);

  int num_steps() const override { return static_cast<int>(steps_.size()); }
  void run(int rank, int step) override;
  int last_kernel() const override;
  bool is_agreed(int step) const override;
  bool waits_for_one_thing(int step) const override;
  bool may_go_on(Failing how, int step, bool is_victim) const override;
  void check_failure(int rank, int step, Failing how, int victim) override;

 private:
  struct Step {
    enum What { kPlan, kDispatch, kCombine } what;
    int plan;  // among the sequence's plans
    int row_bytes, phases, sms;
    ncclep::DType dtype;
    bool has_weights;
  };
  struct Plan {
    bool is_made = false;
    std::optional<Memory> counts, token_routes, routes, rail_memory;
    ncclep::native::RailRoutes rail_routes{};
    ncclep::native::ReceivedRoutes received{};
  };
  struct OfRank {
    OfRank(std::size_t num_plans, const Starts& starts)
        : plans(num_plans), ticket(static_cast<std::uint32_t>(starts.tickets)) {}
    std::vector<Plan> plans;
    std::uint32_t ticket;
    std::set<int> bad_ranks;
  };

  void draw_steps(int number);
  void draw_step(Step::What what, int plan);
  // What ranks must have alike in a step on which hosts do not agree, as the rank has it.
  std::uint64_t call_of(int step, bool differs) const;
  void dispatch(int rank, int step);
  void combine(int rank, int step);
  // plan.cpp
  void plan(int rank, int step);
  void receive(Plan& plan, const Routing& routing, int rank, std::int64_t pairs,
               std::int64_t assignments, const ncclep::native::PlanScratch& scratch, int sms);
  void check_counts(Plan& plan, const Routing& routing, int rank);
  void check_mailbox(const Routing& routing, int rank);
  void check_routes(const Plan& plan, const Routing& routing, int rank);
  // A token of a rank that has rows in another domain.
  struct NodeToken {
    int name;  // there: the order among those of a chunk
    std::uint32_t ranks[ncclep::native::kMaxRankGroups], assignments;  // bits
  };
  std::map<int, NodeToken> node_tokens(const Routing& routing, int source, int domain) const;
  void check_rail_routes(const Plan& plan, const Routing& routing, int rank);
  ncclep::native::TokenRoutes token_routes_of(Plan& plan, int num_tokens) {
    return ncclep::native::TokenRoutes::in(plan.token_routes->data<std::int32_t>(),
                                           context(0).control, num_tokens);
  }

  const Kind kind_;
  const int other_;  // in what a call differs: call_of
  std::vector<Routing> routings_;
  std::vector<Step> steps_;
  std::deque<OfRank> ranks_;
};
