#include "native/split.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"
#include "native/state.h"

namespace ncclep::native {

namespace {

// Bytes in a nanosecond, measured on H200s (docs/performance.md): of one SM, copies over NVLink and
// everything else; and of the link, however many SMs use it.
constexpr double kCopyRate = 40, kLocalRate = 85, kLinkRate = 340;
// Of all CTAs, those that stage; and of combine's, at most those that do not sum up at first, where
// the adding ones send and where others do.  They join in when they are done, so that both kinds of
// work end together.
constexpr double kStaging = 1.0 / 3, kMostAddingAndSending = 9.0 / 16,
                 kMostAddingOrSending = 3.0 / 4;

// A phase more costs the same for all rows and lets pulling wait for fewer: the best number grows
// with the root of the bytes.
constexpr double kPhaseBytes = 2 << 20;

// Between two ranks half of the rows stay where they are: the SMs take longer than the link, and a
// copy more would only be in the way.
constexpr int kRanksThatAddAndSend = 2;

// That many CTAs, rounded, of which `others` are left over.
int some_of(int num_ctas, double wanted, int others) {
  require(num_ctas > others, num_ctas, " SMs for the native engine: it needs at least ", kMinCtas);
  return static_cast<int>(std::lround(std::clamp(wanted, 1.0, double(num_ctas - others))));
}

}  // namespace

DispatchSplit split_dispatch(int num_ctas) {
  const int staging = some_of(num_ctas, kStaging * num_ctas, 1);
  return {staging, num_ctas - staging};
}

int num_phases_of(int most_tokens, int row_bytes) {
  const double root = std::sqrt(most_tokens * double(row_bytes) / kPhaseBytes);
  return std::min(kPhases, 1 + static_cast<int>(std::lround(root)));
}

CombineSplit split_combine(int num_ctas, int num_ranks, int top_k) {
  // Of one token: picks on other ranks, and the sums of them that go between ranks.
  const double ranks = num_ranks, remote = top_k * (ranks - 1) / ranks;
  const double sums = (ranks - 1) * (1 - std::pow(1 - 1 / ranks, top_k));
  // As many CTAs as keep the link busy, if there are so many.
  const double adding = num_ranks == 1 ? 0 : kLinkRate / kLocalRate * (remote + sums) / sums;
  const double sending = num_ranks <= kRanksThatAddAndSend ? 0 : kLinkRate / kCopyRate;
  const double most = (sending == 0 ? kMostAddingAndSending : kMostAddingOrSending) * num_ctas;
  const double scale = std::min(1.0, most / (adding + sending));
  CombineSplit split;
  split.sending = sending == 0 ? 0 : some_of(num_ctas, scale * sending, 2);
  split.adding = some_of(num_ctas - split.sending, scale * adding, 1);
  split.summing = num_ctas - split.adding - split.sending;
  return split;
}

}  // namespace ncclep::native
