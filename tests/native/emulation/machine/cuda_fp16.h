// fp16 for the emulator, rounded to nearest even.
#pragma once

#include <cuda_runtime.h>

struct __half {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half value) {
  _Float16 number;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}
inline __half __float2half_rn(float value) {
  const auto number = static_cast<_Float16>(value);
  __half half;
  std::memcpy(&half, &number, sizeof(half));
  return half;
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
