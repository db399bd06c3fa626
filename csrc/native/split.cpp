#include "native/split.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"

namespace ncclep::native {

namespace {

Split by_share(int num_ctas, double share) {
  require(num_ctas >= 2, num_ctas, " SMs for the native engine: it needs at least 2");
  const int senders = static_cast<int>(std::lround(num_ctas * share));
  const int most = num_ctas - 1;
  return {std::clamp(senders, 1, most), num_ctas - std::clamp(senders, 1, most)};
}

}  // namespace

Split split_dispatch(int num_ctas, int num_ranks, int top_k) {
  // A token is staged once and stored top_k times.  Staging counts twice: it must be ahead.
  return by_share(num_ctas, num_ranks == 1 ? 0 : 2.0 / (2.0 + top_k));
}

Split split_combine(int num_ctas, int num_ranks, int top_k) {
  const double ranks = num_ranks;
  // Of a token: rows that are added for other ranks, rows of its own, and sums that come back.
  const double pushed = top_k * (ranks - 1) / ranks, own = top_k / ranks;
  const double sums = (ranks - 1) * (1 - std::pow(1 - 1 / ranks, top_k));
  return by_share(num_ctas, pushed / (pushed + own + sums));
}

}  // namespace ncclep::native
