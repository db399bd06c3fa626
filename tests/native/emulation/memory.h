// Memory that notices what is written around it, and numbers of each dtype in it.
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

constexpr int kGarbage = 0x7f;  // what memory is filled with that must be written before it is read

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
  // Of all bytes.
  bool is(unsigned char byte) {
    const auto* start = data<unsigned char>();
    return std::all_of(start, start + num_bytes_, [byte](unsigned char i) { return i == byte; });
  }

 private:
  static constexpr std::size_t kEdge = 64;
  static constexpr char kCanary = 0x5c;
  std::size_t num_bytes_;
  std::vector<char> bytes_;
};

// Numbers of one dtype.
class Numbers {
 public:
  explicit Numbers(ncclep::DType dtype) : dtype_(dtype) {}

  ncclep::DType dtype() const { return dtype_; }
  int size() const { return ncclep::itemsize_of(dtype_); }
  std::uint32_t bits(float value) const {
    if (dtype_ == ncclep::DType::kBFloat16) return __float2bfloat16_rn(value).bits;
    if (dtype_ == ncclep::DType::kFloat16) return __float2half_rn(value).bits;
    return __float_as_uint(value);
  }
  float round(float value) const {
    const std::uint32_t number = bits(value);
    const auto half = static_cast<std::uint16_t>(number);
    if (dtype_ == ncclep::DType::kBFloat16) return __bfloat162float({half});
    if (dtype_ == ncclep::DType::kFloat16) return __half2float({half});
    return value;
  }
  void put(Memory& memory, std::size_t i, float value) const {
    const std::uint32_t number = bits(value);  // little-endian
    std::memcpy(memory.data<char>() + i * size(), &number, size());
  }
  std::uint32_t get(Memory& memory, std::size_t i) const {
    std::uint32_t number = 0;
    std::memcpy(&number, memory.data<char>() + i * size(), size());
    return number;
  }

 private:
  ncclep::DType dtype_;
};
