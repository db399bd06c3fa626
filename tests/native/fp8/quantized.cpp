// What is quantised beside its definition: TransformerEngine's rule for blocks of 128.
#include "arrays.h"
#include "experts/fp8_experts.h"
#include "experts/quantize.cuh"

using namespace ncclep::experts;

namespace {

constexpr int kColumns = 256;

float scale_of(float amax) {
  if (!(amax > 0) || std::isinf(amax)) return 1;
  // The largest power of two with which 448 is not exceeded; of subnormal blocks, 2^127.
  return std::ldexp(1.0f, std::min(std::ilogb(448 / static_cast<double>(amax)), 127));
}

// Where rows are quantised to.
struct Target {
  Target(const Experts& experts, int num_columns)
      : columns(num_columns),
        pitch(experts.pitch()),
        blocks(experts.num_blocks() + 2),
        rows(experts.num_rows() * columns, 0x55),
        transposed(columns * blocks * kBlock, 0x55),
        scales(columns / kBlock * pitch, -1),
        scales_transposed(blocks * columns, -1) {}
  Fp8Rows view() {
    return {rows.data(),
            scales.data(),
            transposed.data(),
            scales_transposed.data(),
            columns,
            columns,
            pitch,
            blocks,
            true};
  }
  int columns, pitch, blocks;
  std::vector<std::uint8_t> rows, transposed;
  std::vector<float> scales, scales_transposed;
};

// A quantised value that was computed otherwise may be the next one, and so may the scale of a
// block whose largest value was next to a power of two: 0 where nothing was computed.
void check_block(const std::string& what, const std::vector<float>& values, float inverse,
                 const std::function<std::uint8_t(int)>& found, float slack) {
  float amax = 0;
  for (const float value : values) amax = std::fmax(amax, std::fabs(value));
  const float scale = scale_of(amax), off = inverse * scale;
  if (off != 1 && (slack == 0 || (off != 2 && off != 0.5f))) emu::fail(what + ": scale");
  for (int i = 0; i < static_cast<int>(values.size()); ++i) {
    const float exact = values[i] / inverse, got = from_fp8(found(i));
    if (std::isnan(exact) && std::isnan(got)) continue;
    if (slack == 0 && ncclep::hopper::to_fp8(exact) == found(i)) continue;
    const float bounded = std::fmin(std::fmax(exact, -448.0f), 448.0f);
    if (std::fabs(got - bounded) <= slack * (std::fabs(bounded) / 16 + 1.0f / 1024)) continue;
    emu::fail(what + ": value " + std::to_string(exact) + " is " + std::to_string(got));
  }
}

using ValueAt = std::function<float(int, int)>;

void check_by_rows(const std::string& what, const Experts& experts, const Target& target,
                   const ValueAt& value, float slack) {
  const int columns = target.columns;
  for (int row = 0; row < experts.num_rows(); ++row) {
    for (int first = 0; first < columns; first += kBlock) {
      std::vector<float> values;
      for (int i = 0; i < kBlock; ++i) values.push_back(value(row, first + i));
      check_block(
          what + ", by rows", values, target.scales[first / kBlock * target.pitch + row],
          [&](int i) { return target.rows[row * columns + first + i]; }, slack);
    }
  }
}

void check_transposed(const std::string& what, const Experts& experts, const Target& target,
                      const ValueAt& value, float slack) {
  const int columns = target.columns;
  for (int expert = 0; expert < experts.size(); ++expert) {
    const int end = experts.first_block[expert + 1];
    for (int block = experts.first_block[expert]; block < end; ++block) {
      const int first = experts.offsets[expert] + (block - experts.first_block[expert]) * kBlock;
      const int beyond = experts.offsets[expert + 1];
      for (int column = 0; column < columns; ++column) {
        std::vector<float> values;
        for (int row = first; row < first + kBlock; ++row) {
          values.push_back(row < beyond ? value(row, column) : 0);
        }
        const std::uint8_t* at = &target.transposed[(block * columns + column) * kBlock];
        check_block(
            what + ", transposed", values, target.scales_transposed[block * columns + column],
            [&](int i) { return at[i]; }, slack);
      }
    }
  }
}

void check_target(const std::string& what, const Experts& experts, const Target& target,
                  const ValueAt& value, float slack) {
  check_by_rows(what, experts, target, value, slack);
  check_transposed(what, experts, target, value, slack);
}

void run_blocks(const Experts& experts, const std::function<void(TileShared&)>& kernel) {
  // More blocks than there are, as on a GPU, where the host does not know their number.
  const int blocks = experts.num_blocks() + 2;
  const auto number = [&] { return emu::self().cta->index / (kColumns / kBlock); };
  run(kColumns / kBlock * blocks, kQuantizeThreads, sizeof(TileShared), [&] {
    EMU_REQUIRE(number() < blocks);
    kernel(*reinterpret_cast<TileShared*>(emu::dynamic_shared()));
  });
}

// Half a unit of e4m3's last place, 1/16, and before it one of bf16's, 1/512: as many of the
// former.
constexpr float kRounded = 1.05f;

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// Rows with zeros, subnormal numbers, an infinity and a NaN.
std::vector<__nv_bfloat16> draw_rows(const Experts& experts) {
  auto x = draw_bf16(experts.num_rows() * kColumns, 2);
  if (experts.num_rows() > 8) {
    for (int i = 0; i < kBlock; ++i) {
      x[3 * kColumns + i] = __float2bfloat16_rn(0);
      x[8 * kColumns + i] = __float2bfloat16_rn(1e-40f);
    }
    x[5 * kColumns + 7] = __float2bfloat16_rn(INFINITY);
    x[6 * kColumns + 9] = {0x7fc0};  // NaN
  }
  return x;
}

void check_rows(const Experts& experts) {
  const auto x = draw_rows(experts);
  Target target(experts, kColumns);
  run_blocks(experts, [&](TileShared& shared) {
    quantize_rows({x.data(), experts.offsets.data(), experts.size()}, target.view(), shared);
  });
  const auto value = [&](int row, int column) {
    return __bfloat162float(x[row * kColumns + column]);
  };
  check_target("rows", experts, target, value, 0);
}

void check_packed(const Experts& experts) {
  constexpr int kPitch = ncclep::fp8::packed_bytes(kColumns), kScales = kColumns / kBlock;
  auto x = draw_rows(experts);
  const int rows = experts.num_rows(), zero = experts.offsets[1] - 1;
  std::vector<std::uint8_t> bytes(rows * kPitch, 0x55);
  const PackedRows packed{bytes.data(), kColumns, kPitch};
  run((rows + kBlock - 1) / kBlock * kScales, kQuantizeThreads, 0,
      [&] { pack_rows(x.data(), rows, packed, true); });
  for (int row = 0; row < rows; ++row) {
    for (int first = 0; first < kColumns; first += kBlock) {
      std::vector<float> values;
      for (int i = 0; i < kBlock; ++i) {
        values.push_back(__bfloat162float(x[row * kColumns + first + i]));
      }
      check_block(
          "packed rows", values, packed.scales(row)[first / kBlock],
          [&](int i) { return bytes[row * kPitch + first + i]; }, 0);
    }
    for (int i = kColumns + kScales * 4; i < kPitch; ++i) {
      if (bytes[row * kPitch + i] != 0) emu::fail("packed rows: not zero behind the scales");
    }
  }

  // A row of padding, which dispatch makes zero.
  std::fill_n(bytes.begin() + zero * kPitch, kPitch, 0);
  const auto value = [&](int row, int column) {
    const float exact = from_fp8(bytes[row * kPitch + column]);
    return __bfloat162float(__float2bfloat16_rn(exact * packed.scales(row)[column / kBlock]));
  };
  for (const bool is_transposed : {true, false}) {
    Target target(experts, kColumns);
    Fp8Rows to = target.view();
    to.rows = nullptr;
    if (!is_transposed) to.transposed = nullptr;
    run_blocks(experts, [&](TileShared& shared) {
      unpack_rows(packed, experts.offsets.data(), experts.size(), to, shared);
    });
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < kScales; ++i) {
        if (target.scales[i * target.pitch + row] != packed.scales(row)[i]) {
          emu::fail("unpacked rows: scale");
        }
      }
    }
    if (is_transposed) check_transposed("unpacked rows", experts, target, value, 0);
  }
}

void check_swiglu(const Experts& experts) {
  const int rows = experts.num_rows();
  const auto inputs = draw_bf16(rows * 2 * kColumns, 8), grads = draw_bf16(rows * kColumns, 2);
  std::vector<float> probs(rows), parts(kColumns / kBlock * experts.pitch());
  for (float& prob : probs) prob = std::fabs(draw_float()) / 2;
  const Swiglu job{inputs.data(),          probs.data(),   grads.data(), parts.data(),
                   experts.offsets.data(), experts.size(), kColumns,     experts.pitch()};
  const auto gate = [&](int row, int column) -> double {
    return __bfloat162float(inputs[row * 2 * kColumns + column]);
  };
  const auto up = [&](int row, int column) { return gate(row, kColumns + column); };
  const auto grad = [&](int row, int column) -> double {
    return __bfloat162float(grads[row * kColumns + column]);
  };

  Target result(experts, kColumns), of_inputs(experts, 2 * kColumns);
  run_blocks(experts, [&](TileShared& s) { quantize_swiglu(job, result.view(), s); });
  const auto value = [&](int row, int column) {
    const double g = gate(row, column);
    return static_cast<float>(g * sigmoid_of(g) * up(row, column) * probs[row]);
  };
  check_target("SwiGLU", experts, result, value, kRounded);

  run_blocks(experts, [&](TileShared& s) { quantize_swiglu_grads(job, of_inputs.view(), s); });
  const auto of_input = [&](int row, int column) {
    const int c = column % kColumns;
    const double g = gate(row, c), s = sigmoid_of(g), of_result = grad(row, c) * probs[row];
    const double of_gate = of_result * up(row, c) * s * (1 + g * (1 - s));
    return static_cast<float>(column < kColumns ? of_gate : of_result * g * s);
  };
  check_target("SwiGLU's gradients", experts, of_inputs, of_input, kRounded);
  for (int row = 0; row < rows; ++row) {
    double want = 0, found = 0;
    for (int c = 0; c < kColumns; ++c) {
      want += grad(row, c) * gate(row, c) * sigmoid_of(gate(row, c)) * up(row, c);
    }
    for (int i = 0; i < kColumns / kBlock; ++i) found += parts[i * experts.pitch() + row];
    if (std::fabs(want - found) > 1e-3 * (1 + std::fabs(want)))
      emu::fail("a probability's gradient");
  }
}

void check_weights() {
  constexpr int kExperts = 2, kRows = 256, kBlocks = kRows / kBlock * (kColumns / kBlock);
  auto weights = draw_bf16(kExperts * kRows * kColumns, 2);
  for (int i = 0; i < kBlock * kBlock; ++i) {  // a block of zeros
    weights[i / kBlock * kColumns + i % kBlock] = __float2bfloat16_rn(0);
  }
  std::vector<std::uint8_t> fp8(weights.size()), transposed(weights.size());
  std::vector<float> scales(kExperts * kBlocks), scales_transposed(scales.size());
  const Weights job{weights.data(),           fp8.data(), transposed.data(), scales.data(),
                    scales_transposed.data(), kRows,      kColumns,          true};
  run(kExperts * kBlocks, kQuantizeThreads, sizeof(TileShared),
      [&] { quantize_weights(job, *reinterpret_cast<TileShared*>(emu::dynamic_shared())); });
  for (int number = 0; number < kExperts * kBlocks; ++number) {
    const int expert = number / kBlocks, row = number % kBlocks / (kColumns / kBlock) * kBlock;
    const int column = number % (kColumns / kBlock) * kBlock;
    const int turned = expert * kBlocks + column / kBlock * (kRows / kBlock) + row / kBlock;
    if (scales[number] != scales_transposed[turned]) emu::fail("weights: transposed scales");
    std::vector<float> values;
    const auto place = [&](int i) {
      return (expert * kRows + row + i / kBlock) * kColumns + column + i % kBlock;
    };
    for (int i = 0; i < kBlock * kBlock; ++i) values.push_back(__bfloat162float(weights[place(i)]));
    check_block("weights", values, scales[number], [&](int i) { return fp8[place(i)]; }, 0);
    for (int i = 0; i < kBlock * kBlock; ++i) {
      const int at = (expert * kColumns + column + i % kBlock) * kRows + row + i / kBlock;
      if (transposed[at] != fp8[place(i)]) emu::fail("weights: transposed");
    }
  }
}

}  // namespace

void check_quantized() {
  const Experts experts({129, 0, 1, 256});
  check_rows(experts);
  check_packed(experts);
  check_swiglu(experts);
  check_weights();
}
