// What goes through the native engine's groups, and the groups themselves.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cases.h"
#include "fixtures.h"
#include "native/host/group.h"
#include "native/low_latency/host.h"
#include "standin.h"

using ncclep::native::AllGather;
using ncclep::native::Group;
using ncclep::native::LowLatency;
using ncclep::native::Phase;
using ncclep::native::Plan;

// A communicator's groups and low-latency objects.  Whatever has failed, its end closes them, each
// twice, and nothing is left.
struct Life {
  Life() : communicator(make_communicator()) {}
  ~Life() {
    standin::fail_after(-1);
    fail_nccl_after(-1);
    for (int turn = 0; turn < 2; ++turn) {
      for (const auto& each : low_latency) each->close();
      for (const auto& group : groups) group->close();
      communicator->close();
    }
    REQUIRE(num_alive() == 0);
  }

  Group& make_group(double timeout_s = 1, int num_experts = kExperts) {
    groups.push_back(std::make_shared<Group>(communicator, num_experts, timeout_s));
    return *groups.back();
  }

  // With windows.
  Group& open_group(double timeout_s = 1, int num_experts = kExperts) {
    Group& group = make_group(timeout_s, num_experts);
    grow(group, kTokens);
    return group;
  }

  void grow(Group& group, int num_tokens) {
    group.allocate(num_tokens, kTopK, 32);
    open(group);
    REQUIRE(group.fits(num_tokens, kTopK, 32) && group.windows().size() == 2);
  }

  // Of the first group.
  LowLatency& open_low_latency() {
    const ncclep::native::LowLatencySizes sizes{kTokens,         kHidden,         kTopK,
                                                DType::kFloat32, DType::kFloat32, /*num_scales*/ 4};
    low_latency.push_back(std::make_shared<LowLatency>(groups.front(), sizes));
    open(*low_latency.back());
    return *low_latency.back();
  }

  template <typename Owner>
  void open(Owner& owner) {
    try {
      owner.open();
      owner.clear();
    } catch (...) {
      // Windows that are open stay so, on purpose: here they go, so that other leaks are seen.
      const auto left = owner.windows();
      owner.drop();
      standin::fail_after(-1);
      fail_nccl_after(-1);
      for (const auto& window : left) window->close();
      throw;
    }
  }

  std::shared_ptr<Communicator> communicator;
  std::vector<std::shared_ptr<Group>> groups;
  std::vector<std::shared_ptr<LowLatency>> low_latency;
};

// What a plan keeps, and what goes through it.
struct Batch {
  explicit Batch(int num_experts = kExperts)
      : counts{DType::kInt64, {2 * num_experts / kRanks + 1}},
        rows_of_expert{DType::kInt64, {num_experts / kRanks}} {}

  Owned counts, rows_of_expert, token_routes{DType::kInt32, {4, kTokens}};
  Owned topk{DType::kInt64, {kTokens, kTopK}}, kept{DType::kInt32, {kTokens, kTopK}};
  Owned x{DType::kFloat32, {kTokens, kHidden}}, rows{DType::kFloat32, {2, kHidden}};
  Owned x_bytes{DType::kUint8, {kTokens, 4 * kHidden}}, rows_bytes{DType::kUint8, {2, 4 * kHidden}};
  Owned w{DType::kFloat32, {kTokens, kTopK}}, row_w{DType::kFloat32, {2}};
  std::vector<Owned> routes;
  Plan plan{counts, token_routes, /*num_chunks*/ 1, kTopK, /*number*/ 1};

  Owned& make_routes(Group& group, int max_pairs, int max_assignments) {
    const std::int64_t size = group.routes_size(max_pairs, max_assignments, 1);
    return routes.emplace_back(DType::kInt32, std::vector<std::int64_t>{size});
  }

  std::uint32_t make_plan(Group& group, bool is_static, int max_pairs, int max_assignments,
                          std::uintptr_t stream = kStream) {
    const auto if_static = is_static ? std::optional(kept.tensor) : std::nullopt;
    return group.plan(plan, topk, 1, is_static ? 2 : 0, if_static, {}, max_pairs, max_assignments,
                      make_routes(group, max_pairs, max_assignments), 8, stream);
  }

  void receive(Group& group, int max_pairs, int max_assignments) {
    group.plan_receive(plan, max_pairs, max_assignments,
                       make_routes(group, max_pairs, max_assignments), 8, kStream);
  }

  void dispatch(Group& group, std::uintptr_t stream) {
    group.dispatch(plan, x, w.tensor, rows, row_w.tensor, 8, stream);
  }

  void move(Group& group) {
    dispatch(group, kStream);
    group.dispatch(plan, x, std::nullopt, rows, std::nullopt, 8, kOtherStream);
    group.dispatch(plan, x_bytes, w.tensor, rows_bytes, row_w.tensor, 8, kStream);
    const Owned sums(DType::kFloat32, {group.sums_size(plan, 8, kHidden * 4), kHidden});
    group.combine(plan, rows, row_w.tensor, sums, x, w.tensor, 8, kStream);
    const std::optional<Tensor> none_needed =
        sums.tensor.shape[0] > 0 ? std::optional<Tensor>(sums.tensor) : std::nullopt;
    group.combine(plan, rows, std::nullopt, none_needed, x, std::nullopt, 8, kOtherStream);
    const auto add_bytes = [&] {
      group.combine(plan, rows_bytes, std::nullopt, {}, x_bytes, std::nullopt, 8, kStream);
    };
    REQUIRE(refuses(add_bytes, "combine: rows must be bf16, fp16 or fp32"));
  }
};

// What goes through a low-latency object.
struct FewTokens {
  Owned x{DType::kFloat32, {kTokens, kHidden}}, scales{DType::kFloat32, {kTokens, 4}};
  Owned topk{DType::kInt32, {kTokens, kTopK}}, weights{DType::kFloat32, {kTokens, kTopK}};
  Owned counts{DType::kInt32, {kRanks}}, y{DType::kFloat32, {kRanks * kTokens, kHidden}};
  Owned few{DType::kFloat32, {3, kHidden}}, rows_of{DType::kInt32, {kRanks, kTokens, kTopK}};
  Owned out{DType::kFloat32, {kTokens, kHidden}};

  void dispatch(LowLatency& ll, bool completes, std::uintptr_t stream) {
    ll.dispatch(x, scales.tensor, topk, weights, counts, completes, 8, stream);
  }
  void combine(LowLatency& ll, bool sends, bool completes, std::uintptr_t stream) {
    ll.combine(y, std::nullopt, out, sends, completes, 8, stream);
  }
};
