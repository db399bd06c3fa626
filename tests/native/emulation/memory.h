// Memory that notices what is written around it, the payload, and numbers of each dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/dtype.h"
#include "common/error.h"
#include "emulator.h"

template <typename... Text>
void require(bool holds, const Text&... text) {
  if (!holds) emu::fail(ncclep::join_text(text...));
}

constexpr int kGarbage = 0x7f;  // fills memory that must be written before it is read

class Memory {
 public:
  Memory(std::size_t num_bytes, int fill)
      : num_bytes_(num_bytes), bytes_(num_bytes + 3 * kEdge, kCanary) {
    std::memset(data<char>(), fill, num_bytes);
    emu::add_memory(data<char>(), num_bytes);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    emu::forget_memory(data<char>());
    const char *start = data<char>(), *end = start + num_bytes_;
    const auto is_canary = [](char byte) { return byte == kCanary; };
    require(std::all_of<const char*>(bytes_.data(), start, is_canary) &&
                std::all_of<const char*>(end, bytes_.data() + bytes_.size(), is_canary),
            "something was written around ", num_bytes_, " bytes of memory");
  }
  template <typename T>
  T* data() {
    const auto first = reinterpret_cast<std::uintptr_t>(bytes_.data()) + kEdge;
    return reinterpret_cast<T*>((first + kEdge - 1) / kEdge * kEdge);
  }
  std::size_t num_bytes() const { return num_bytes_; }
  std::vector<char> copy() { return {data<char>(), data<char>() + num_bytes_}; }
  bool is_filled_with(unsigned char byte) {
    const auto* start = data<unsigned char>();
    return std::all_of(start, start + num_bytes_, [byte](unsigned char i) { return i == byte; });
  }

 private:
  static constexpr std::size_t kEdge = 64;
  static constexpr char kCanary = 0x5c;
  std::size_t num_bytes_;
  std::vector<char> bytes_;
};

// Payload: number `i` of a row of a rank in a step.  Sums of it depend on their order.
inline float value(int step, int rank, int row, int i) {
  const unsigned int mixed = (step * 7919u + rank * 1009u + row * 131u + i * 17u) * 2654435761u;
  return (static_cast<int>(mixed >> 8) - (1 << 23)) / static_cast<float>((1 + mixed % 997) << 14);
}
inline float weight(int step, int rank, int i) { return value(step + 1'000'000, rank, i, 0); }

// Numbers of one dtype.
class Numbers {
 public:
  explicit Numbers(ncclep::DType dtype) : dtype_(dtype) {}
  static Numbers of_any_dtype() {
    return Numbers(emu::one_of({ncclepFloat32, ncclepBfloat16, ncclepFloat16}));
  }

  ncclep::DType dtype() const { return dtype_; }
  int size() const { return ncclep::itemsize_of(dtype_); }
  std::uint32_t bits(float number) const {
    const auto half = static_cast<__half>(number);
    std::uint16_t bits_of_half;
    std::memcpy(&bits_of_half, &half, sizeof(half));
    return dtype_ == ncclepFloat16    ? bits_of_half
           : dtype_ == ncclepBfloat16 ? __float2bfloat16_rn(number).bits
                                      : __float_as_uint(number);
  }
  float round(float number) const {
    return dtype_ == ncclepFloat16    ? static_cast<float>(static_cast<__half>(number))
           : dtype_ == ncclepBfloat16 ? __bfloat162float(__float2bfloat16_rn(number))
                                      : number;
  }
  std::uint32_t get(const char* first, std::size_t i) const {
    std::uint32_t number = 0;  // little-endian
    std::memcpy(&number, first + i * size(), size());
    return number;
  }
  // Writes number(0), number(1) and so on.
  template <typename Number>
  void put(char* first, std::size_t count, Number&& number) const {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t bits_of_number = bits(number(static_cast<int>(i)));
      std::memcpy(first + i * size(), &bits_of_number, size());
    }
  }
  // Requires expected(0), expected(1) and so on.
  template <typename Number, typename... Text>
  void expect(const char* first, std::size_t count, Number&& expected, const Text&... text) const {
    for (std::size_t i = 0; i < count; ++i) {
      require(get(first, i) == bits(expected(static_cast<int>(i))), text..., ", at number ", i,
              " of ", count);
    }
  }

 private:
  ncclep::DType dtype_;
};
inline const Numbers kWeights(ncclepFloat32);
