#include "native/rows/cta_roles.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"

namespace ncclep::native {

namespace {

// Bytes per nanosecond, measured on H200s (docs/performance.md): of one SM, for copies over NVLink
// and for everything else; and of the link, however many SMs use it.
constexpr double kCopyRate = 40, kLocalRate = 85, kLinkRate = 340;
// Fractions of all CTAs: those that stage in dispatch, and at most those that add or send in
// combine, where the adding CTAs send and where others do.  They join the last kind of work when
// they are done, so that both kinds end together.
constexpr double kStaging = 1.0 / 3, kMostAddingAndSending = 9.0 / 16,
                 kMostAddingOrSending = 3.0 / 4;

// Each phase has a fixed cost and shortens the wait before pulling can start: the best number grows
// with the square root of the bytes.
constexpr double kPhaseBytes = 2 << 20;

// Up to this many ranks the adding CTAs send: one more copy of every sum would only cost time.
// Measured with 2 and 4 ranks; not measured with more (docs/performance.md).
constexpr int kRanksThatAddAndSend = 4;

// Rounds `requested` to a number of CTAs, at least `least`, that leaves at least `others` of
// `num_ctas`.
int some_of(int num_ctas, double requested, int least, int others) {
  return static_cast<int>(
      std::lround(std::clamp(requested, double(least), double(num_ctas - others))));
}

int divide_up(int number, int by) { return (number + by - 1) / by; }

// CTAs needed for one warp per other rank, if a CTA has `warps`.
int ctas_for_others(int num_ranks, int warps) {
  return std::max(1, divide_up(num_ranks - 1, warps));
}

void require_rows(int row_bytes) {
  require(0 < row_bytes && row_bytes <= kMaxRowBytes, "rows of ", row_bytes, " bytes: from 1 to ",
          kMaxRowBytes);
}

void require_enough(int num_ctas, int num_ranks) {
  require(num_ctas >= min_ctas(num_ranks), num_ctas, " SMs for the native engine: with ", num_ranks,
          " ranks it needs at least ", min_ctas(num_ranks));
}

}  // namespace

RingShape ring_shape(int row_bytes) {
  RingShape shape;
  shape.pieces = divide_up(row_bytes, kMaxRingPiece);
  shape.piece_bytes = (row_bytes / shape.pieces + 15) / 16 * 16;
  if (shape.piece_bytes * shape.pieces < row_bytes) shape.piece_bytes += 16;
  shape.warps = std::min(kMaxRingWarps, kRingBytes / (kRingStages * shape.piece_bytes));
  return shape;
}

RingShape sending_ring_shape(int row_bytes) {
  RingShape shape = ring_shape(row_bytes);
  shape.warps = std::min(shape.warps, kWarps - 2);
  return shape;
}

// Dispatch needs one to stage and one to pull; combine those that add and one to sum, and 3 at
// least.
int min_ctas(int num_ranks) {
  require(0 < num_ranks && num_ranks <= kMaxRanks, num_ranks, " ranks: from 1 to ", kMaxRanks);
  return std::max(3, ctas_for_others(num_ranks, kAddingWarps) + 1);
}

DispatchSplit split_dispatch(int num_ctas) {
  require_enough(num_ctas, 1);
  const int staging = some_of(num_ctas, kStaging * num_ctas, 1, 1);
  return {staging, num_ctas - staging};
}

int num_phases_of(int most_tokens, int row_bytes) {
  require(0 <= most_tokens && most_tokens <= kMaxTokens, most_tokens, " tokens: at most ",
          kMaxTokens);
  require_rows(row_bytes);
  const double root = std::sqrt(most_tokens * double(row_bytes) / kPhaseBytes);
  return std::min(kPhases, 1 + static_cast<int>(std::lround(root)));
}

CombineSplit split_combine(int num_ctas, int num_ranks, int top_k, int row_bytes, int num_domains) {
  require_enough(num_ctas, num_ranks);
  require(0 < top_k && top_k <= kMaxTopK, "top-k ", top_k, ": from 1 to ", kMaxTopK);
  require_rows(row_bytes);
  const int least_adding = ctas_for_others(num_ranks, kAddingWarps);
  const int least_sending = ctas_for_others(num_ranks, sending_ring_shape(row_bytes).warps);
  const bool has_senders = num_domains == 1 && num_ranks > kRanksThatAddAndSend &&
                           least_adding + least_sending < num_ctas;
  // Per token: assignments on other ranks, and their sums that cross between ranks.
  const double ranks = num_ranks, remote = top_k * (ranks - 1) / ranks;
  const double sums = (ranks - 1) * (1 - std::pow(1 - 1 / ranks, top_k));
  // As many CTAs as keep the link busy, if there are that many.
  const double adding = num_ranks == 1 ? 0 : kLinkRate / kLocalRate * (remote + sums) / sums;
  const double sending = has_senders ? kLinkRate / kCopyRate : 0;
  const double most = (has_senders ? kMostAddingOrSending : kMostAddingAndSending) * num_ctas;
  const double scale = std::min(1.0, most / (adding + sending));
  CombineSplit split;
  split.sending =
      has_senders ? some_of(num_ctas, scale * sending, least_sending, least_adding + 1) : 0;
  split.adding = some_of(num_ctas - split.sending, scale * adding, least_adding, 1);
  split.summing = num_ctas - split.adding - split.sending;
  return split;
}

}  // namespace ncclep::native
