// Numbers for FP8 products and what the tests of both programs share.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "experts/hopper.cuh"

using ncclep::hopper::from_fp8;

// Where each expert's rows begin, and how many blocks of 128 they fill.
struct Experts {
  explicit Experts(const std::vector<int>& counts) {
    for (const int count : counts) {
      first_block.push_back(first_block.back() + (count + 127) / 128);
      offsets.push_back(offsets.back() + count);
    }
  }
  int size() const { return static_cast<int>(offsets.size()) - 1; }
  int num_rows() const { return offsets.back(); }
  int num_blocks() const { return first_block.back(); }
  int pitch() const { return (num_rows() + 3) / 4 * 4 + 4; }  // of scales, by row

  std::vector<std::int32_t> offsets{0};
  std::vector<int> first_block{0};
};

inline float draw_float() { return static_cast<float>(emu::between(-1000, 1000)) / 500; }
inline std::vector<float> draw_scales(std::size_t size) {
  std::vector<float> scales(size);
  for (float& scale : scales) scale = std::ldexp(1.0f, emu::between(-2, 2));
  return scales;
}
inline std::vector<std::uint8_t> draw_fp8(std::size_t size) {
  std::vector<std::uint8_t> bytes(size);
  for (std::uint8_t& byte : bytes) {
    do {
      byte = static_cast<std::uint8_t>(emu::draw(256));
    } while (std::isnan(from_fp8(byte)));
  }
  return bytes;
}
inline std::vector<__nv_bfloat16> draw_bf16(std::size_t size, float most) {
  std::vector<__nv_bfloat16> values(size);
  for (__nv_bfloat16& value : values) value = __float2bfloat16_rn(draw_float() * most / 2);
  return values;
}

// Runs a kernel alone.
inline void run(int ctas, int threads, std::size_t shared_bytes,
                const std::function<void()>& kernel) {
  emu::run(1, [&](int rank) {
    emu::launch(rank, ctas, threads, shared_bytes, kernel);
    emu::synchronize(rank);
  });
}

void check_products();
void check_quantized();
