#include "sequence.h"

#include <algorithm>

#include "native/rows/cta_roles.h"

using namespace ncclep::native;

Sizes draw_sizes(const std::string& kind, int ranks, const Starts& starts) {
  Sizes sizes{};
  sizes.ranks = ranks;
  sizes.starts = starts;
  sizes.local = between(1, 3);
  sizes.max_tokens = one_of({8, 40, 130, 300});
  sizes.max_top_k = between(1, 6);
  sizes.max_row_bytes =
      16 * (sizes.max_tokens > 200 ? one_of({4, 16, 65}) : one_of({16, 129, 384}));
  emu::kMaxHeldBytes = 8 * 1024;
  if (kind == "chunks") {
    sizes.max_tokens = 550;
    sizes.max_top_k = between(1, 3);
    sizes.max_row_bytes = 16;
    emu::kMaxHeldBytes = 3 * 1024;  // one chunk or two
  } else if (kind == "experts") {
    sizes.local = between(33, 40);
    sizes.max_tokens = one_of({8, 40});
    sizes.max_top_k = ranks <= 3 ? 16 : 8;
    sizes.max_row_bytes = 64;
  } else if (kind == "combines") {
    sizes.max_tokens = 400;
    sizes.max_row_bytes = 16 * one_of({1, 4});
  } else if (kind == "calls") {
    sizes.max_tokens = 8;
    sizes.max_row_bytes = 16;
  } else if (kind != "rows") {
    sizes.max_tokens = one_of({8, 40, 130});
    sizes.max_row_bytes = 16 * one_of({4, 65});
  }
  sizes.max_top_k = std::min(sizes.experts(), sizes.max_top_k);
  return sizes;
}

Shares shares_of(const std::string& kind) {
  if (kind == "dispatches") return {1, 8, 0};
  if (kind == "combines") return {1, 0, 0};
  if (kind == "plans") return {8, 1, between(5, 40)};
  if (kind == "late") return {5, 3, 0};
  return {};
}

std::vector<Step> draw_steps(const Sizes& sizes, const Shares& shares, int number,
                             std::vector<Routing>& routings) {
  std::vector<Step> steps;
  std::vector<int> plans;  // those that can be used
  const int other = one_of({0, 1, 2, 3, between(4, 10), between(11, 17)});
  for (int i = 0; i <= number; ++i) {
    Step step{};
    step.number = i;
    const int what = plans.empty() ? 0 : between(0, 9);
    step.kind = what < shares.plans                       ? Step::kPlan
                : what < shares.plans + shares.dispatches ? Step::kDispatch
                                                          : Step::kCombine;
    if (step.kind == Step::kPlan) {
      step.plan = static_cast<int>(routings.size());
      routings.push_back(draw_routing(sizes, one_of({0, shares.bad_assignments})));
      if (!routings.back().is_refused()) plans.push_back(step.plan);
    } else {
      step.plan = plans[emu::draw(plans.size())];
    }
    step.row_bytes = std::min(sizes.max_row_bytes, 16 * one_of({1, 3, 16, 65, 128, 129, 256, 384}));
    step.dtype =
        one_of({ncclep::DType::kFloat32, ncclep::DType::kBFloat16, ncclep::DType::kFloat16});
    step.phases = between(1, kPhases);
    step.sms = between(min_ctas(sizes.ranks), kSms);
    step.has_weights = between(0, 1) == 1;
    step.other = other;
    steps.push_back(step);
  }
  return steps;
}
