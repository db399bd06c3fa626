// FP8 products beside their definition, in fp64.
#include "experts/products.cuh"

#include "arrays.h"

using namespace ncclep::experts;

namespace {

template <typename T>
CUtensorMap map_of(const std::vector<T>& values, long width, long height, int box_width,
                   int box_height, bool is_swizzled = true) {
  return {reinterpret_cast<const char*>(values.data()),
          width,
          height,
          static_cast<int>(sizeof(T)),
          box_width,
          box_height,
          is_swizzled};
}
CUtensorMap map_of_scales(const std::vector<float>& values, long width, long height, int box) {
  return map_of(values, width, height, box, 1, false);
}

constexpr int kClusters = 2;
constexpr std::uint16_t kUntouched = 0x1234;

// A sum and how far the kernel's may be off: products of e4m3 and scales are exact in fp32, whose
// sums are rounded at each step.
struct Sum {
  double value = 0, magnitude = 0;
  void add(double each) {
    value += each;
    magnitude += std::fabs(each);
  }
  bool is(float found, double rounding) const {
    return std::fabs(found - value) <= rounding * std::fabs(value) + 1e-5 * magnitude;
  }
};

void check_rows(const Experts& experts) {
  constexpr int kDepth = 384, kColumns = 512;
  const int rows = experts.num_rows(), pitch = experts.pitch();
  const auto a = draw_fp8(static_cast<std::size_t>(rows) * kDepth);
  const auto b = draw_fp8(static_cast<std::size_t>(experts.size()) * kColumns * kDepth);
  const auto scales_a = draw_scales(kDepth / kBlock * pitch);
  const auto scales_b = draw_scales(b.size() / kBlock / kBlock);
  std::vector<__nv_bfloat16> out(static_cast<std::size_t>(rows + 256) * kColumns, {kUntouched});
  const GemmMaps maps{
      map_of(a, kDepth, rows, kBlock, kTileRows),
      map_of(b, kDepth, experts.size() * kColumns, kBlock, kTileColumns / kClusterCtas),
      map_of_scales(scales_a, pitch, kDepth / kBlock, kScalesOfA),
      map_of(out, kColumns, rows, kOutColumns<__nv_bfloat16>, kOutRows),
      {}};
  const Gemm gemm{experts.offsets.data(), experts.size(), 0,    kColumns, kDepth,
                  scales_b.data(),        out.data(),     false};
  run(kClusters * kClusterCtas, kGemmThreads, sizeof(GemmShared),
      [&] { run_gemm<false>(maps, gemm, *reinterpret_cast<GemmShared*>(emu::dynamic_shared())); });
  for (int expert = 0; expert < experts.size(); ++expert) {
    for (int row = experts.offsets[expert]; row < experts.offsets[expert + 1]; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        const int weight = expert * kColumns + column;
        Sum sum;
        for (int k = 0; k < kDepth; ++k) {
          sum.add(static_cast<double>(from_fp8(a[row * kDepth + k])) *
                  from_fp8(b[weight * kDepth + k]) * scales_a[k / kBlock * pitch + row] *
                  scales_b[weight / kBlock * (kDepth / kBlock) + k / kBlock]);
        }
        const float found = __bfloat162float(out[row * kColumns + column]);
        if (!sum.is(found, 1 / 256.0)) {
          emu::fail("rows: row " + std::to_string(row) + ", column " + std::to_string(column));
        }
      }
    }
  }
  for (int column = 0; column < kColumns; ++column) {
    if (out[rows * kColumns + column].bits != kUntouched) emu::fail("rows: after the last one");
  }
}

void check_weights(const Experts& experts, bool adds) {
  constexpr int kRows = 384, kColumns = 256;  // not a whole number of clusters' rows
  constexpr float kBefore = 3;
  const long width = experts.num_blocks() * kBlock;
  const auto a = draw_fp8(kRows * width), b = draw_fp8(kColumns * width);
  const auto scales_a = draw_scales(experts.num_blocks() * kRows);
  const auto scales_b = draw_scales(experts.num_blocks() * kColumns);
  std::vector<float> out(static_cast<std::size_t>(experts.size()) * kRows * kColumns, kBefore);
  const long num_blocks = experts.num_blocks();
  const GemmMaps maps{map_of(a, kBlock, num_blocks * kRows, kBlock, kTileRows),
                      map_of(b, kBlock, num_blocks * kColumns, kBlock, kTileColumns / kClusterCtas),
                      map_of_scales(scales_a, kRows, num_blocks, kScalesOfA),
                      map_of(out, kColumns, experts.size() * kRows, kOutColumns<float>, kOutRows),
                      map_of_scales(scales_b, kColumns, num_blocks, kTileColumns)};
  const Gemm gemm{
      experts.offsets.data(), experts.size(), kRows, kColumns, 0, nullptr, nullptr, adds};
  run(kClusters * kClusterCtas, kGemmThreads, sizeof(GemmShared),
      [&] { run_gemm<true>(maps, gemm, *reinterpret_cast<GemmShared*>(emu::dynamic_shared())); });
  for (int i = 0; i < static_cast<int>(out.size()); ++i) {
    const int expert = i / kColumns / kRows, row = i / kColumns % kRows, column = i % kColumns;
    Sum sum;
    if (adds) sum.add(kBefore);
    const int end = experts.first_block[expert + 1];
    for (int block = experts.first_block[expert]; block < end; ++block) {
      for (int k = 0; k < kBlock; ++k) {
        sum.add(static_cast<double>(from_fp8(a[(block * kRows + row) * kBlock + k])) *
                from_fp8(b[(block * kColumns + column) * kBlock + k]) *
                scales_a[block * kRows + row] * scales_b[block * kColumns + column]);
      }
    }
    if (!sum.is(out[i], 0)) {
      emu::fail("weights: expert " + std::to_string(expert) + ", row " + std::to_string(row) +
                ", column " + std::to_string(column));
    }
  }
}

}  // namespace

void check_products() {
  const Experts experts({129, 0, 300}), few({0, 1});
  check_rows(experts);
  check_rows(few);
  check_weights(experts, true);
  check_weights(few, false);
}
