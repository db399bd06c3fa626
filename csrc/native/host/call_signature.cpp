#include "native/host/call_signature.h"

#include "common/error.h"

namespace ncclep::native {

namespace {

// Fields, from the lowest bit on.
constexpr int kPhaseBits = 3;
// Dispatch and combine: 16-byte vectors of a row, dtype, weights, plan.
constexpr int kVectorBits = 27, kDTypeBits = 3, kWeightBits = 1, kPlanBits = 14;
// Plan: top-k, the alignment's power of two, rows.
constexpr int kTopKBits = 6, kPowerBits = 5, kRowBits = 32;

static_assert(kPhaseBits + kVectorBits + kDTypeBits + kWeightBits + kPlanBits == 48);
static_assert(kPhaseBits + kTopKBits + kPowerBits + kRowBits <= 48);
static_assert(kMaxRowBytes / 16 < 1 << kVectorBits && kMaxTopK < 1 << kTopKBits);

// Packs fields, or unpacks them in the same order.
class Bits {
 public:
  explicit Bits(std::uint64_t bits = 0) : bits_(bits) {}
  Bits& put(std::uint64_t value, int width) {
    bits_ |= (value & mask(width)) << place_;
    place_ += width;
    return *this;
  }
  std::int64_t take(int width) {
    const std::uint64_t value = bits_ >> place_ & mask(width);
    place_ += width;
    return static_cast<std::int64_t>(value);
  }
  std::uint64_t all() const { return bits_; }

 private:
  static std::uint64_t mask(int width) { return (std::uint64_t{1} << width) - 1; }
  std::uint64_t bits_;
  int place_ = 0;
};

int power_of(int alignment) {
  int power = 0;
  while (1 << power < alignment) ++power;
  return power;
}

}  // namespace

std::uint64_t call_of_rows(Phase phase, std::uint64_t plan, DType dtype, int row_bytes,
                           bool has_weights) {
  return Bits()
      .put(static_cast<std::uint64_t>(phase), kPhaseBits)
      .put(row_bytes / 16, kVectorBits)
      .put(static_cast<std::uint64_t>(dtype), kDTypeBits)
      .put(has_weights, kWeightBits)
      .put(plan, kPlanBits)
      .all();
}

std::uint64_t call_of_plan(int top_k, int alignment, std::int64_t max_recv_rows) {
  return Bits()
      .put(static_cast<std::uint64_t>(Phase::kPlan), kPhaseBits)
      .put(top_k, kTopKBits)
      .put(power_of(alignment), kPowerBits)
      .put(max_recv_rows, kRowBits)
      .all();
}

std::map<std::string, std::int64_t> values_of(std::uint64_t call) {
  std::map<std::string, std::int64_t> values;
  Bits bits(call);
  const auto phase = static_cast<Phase>(bits.take(kPhaseBits));
  if (phase == Phase::kNone) return values;
  values["phase"] = static_cast<std::int64_t>(phase);
  if (phase == Phase::kPlan) {
    values["top_k"] = bits.take(kTopKBits);
    values["alignment"] = std::int64_t{1} << bits.take(kPowerBits);
    values["max_recv_rows"] = bits.take(kRowBits);
    return values;
  }
  const std::int64_t row_bytes = 16 * bits.take(kVectorBits);
  const auto dtype = static_cast<DType>(bits.take(kDTypeBits));
  values["dtype"] = static_cast<std::int64_t>(dtype);
  const int itemsize = itemsize_of(dtype);  // 0: not a dtype, so no rank packed this
  values["hidden size"] = itemsize == 0 ? 0 : row_bytes / itemsize;
  values["presence of weights"] = bits.take(kWeightBits);
  values["plan"] = bits.take(kPlanBits);
  return values;
}

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kPlan:
      return "plan";
    case Phase::kRoutes:
      return "plan, receiving routes";
    case Phase::kDispatch:
      return "dispatch";
    case Phase::kCombine:
      return "combine";
    case Phase::kLowLatencyDispatch:
      return "low-latency dispatch";
    case Phase::kLowLatencyCombine:
      return "low-latency combine";
    case Phase::kNone:
      break;
  }
  return "none";
}

const char* name_of(Reason reason) {
  switch (reason) {
    case Reason::kLate:
      return "late";
    case Reason::kDiffers:
      return "differs";
    case Reason::kRefused:
      return "refused";
    case Reason::kOutOfTurn:
      return "out of turn";
    case Reason::kNone:
      break;
  }
  return "none";
}

Phase phase_of(const std::string& name) {
  for (auto phase : {Phase::kPlan, Phase::kRoutes, Phase::kDispatch, Phase::kCombine,
                     Phase::kLowLatencyDispatch, Phase::kLowLatencyCombine}) {
    if (name == name_of(phase)) return phase;
  }
  fail("no call has a phase '", name, "'");
}

}  // namespace ncclep::native
