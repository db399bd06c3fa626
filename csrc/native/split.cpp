#include "native/split.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"

namespace ncclep::native {

namespace {

// Bytes that one SM moves in a nanosecond: copies over NVLink, and everything else (measured on
// H200s, docs/performance.md).
constexpr double kLinkRate = 40, kLocalRate = 75;

// Between two ranks half of the rows stay where they are: the SMs take longer than the link, and a
// copy more would only be in the way.
constexpr int kRanksThatAddAndSend = 2;

int share_of(int num_ctas, double share, int others) {
  require(num_ctas > others, num_ctas, " SMs for the native engine: it needs at least ", kMinCtas);
  return std::clamp(static_cast<int>(std::lround(num_ctas * share)), 1, num_ctas - others);
}

}  // namespace

DispatchSplit split_dispatch(int num_ctas, int num_ranks, int top_k) {
  // A token is staged once and stored top_k times.  Staging counts twice: it must be ahead.
  const int staging = share_of(num_ctas, num_ranks == 1 ? 0 : 2.0 / (2.0 + top_k), 1);
  return {staging, num_ctas - staging};
}

CombineSplit split_combine(int num_ctas, int num_ranks, int top_k) {
  const double ranks = num_ranks;
  // Rows of one token: picks on other ranks and on its own, and sums that go between ranks.
  const double remote = top_k * (ranks - 1) / ranks, own = top_k / ranks;
  const double sums = (ranks - 1) * (1 - std::pow(1 - 1 / ranks, top_k));
  const double adding = (remote + sums) / kLocalRate, sending = sums / kLinkRate;
  const double summing = (own + sums + 1) / kLocalRate, all = adding + sending + summing;
  CombineSplit split;
  if (num_ranks <= kRanksThatAddAndSend) {
    split.adding = share_of(num_ctas, num_ranks == 1 ? 0 : adding / (adding + summing), 1);
    split.sending = 0;
  } else {
    split.adding = share_of(num_ctas, adding / all, 2);
    split.sending = share_of(num_ctas - split.adding, sending / (sending + summing), 1);
  }
  split.summing = num_ctas - split.adding - split.sending;
  return split;
}

}  // namespace ncclep::native
