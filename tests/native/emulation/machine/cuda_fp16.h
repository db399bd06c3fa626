// fp16 for the emulator, rounded to nearest even; no NaN.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

struct __half {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half value) {
  const int exponent = value.bits >> 10 & 0x1f, fraction = value.bits & 0x3ff;
  const float size = exponent == 0x1f ? HUGE_VALF
                     : exponent == 0
                         ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return value.bits >> 15 ? -size : size;
}

inline __half __float2half_rn(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const float size = std::fabs(value);
  if (size >= 65520) return {static_cast<std::uint16_t>(sign | 0x7c00)};
  if (size == 0) return {sign};
  int exponent = 0;  // size < 2^exponent
  std::frexp(size, &exponent);
  const int last = std::max(exponent - 11, -24);  // 2^last: the last bit
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, -last)));
  // A fraction that overflows goes into the exponent.
  return {static_cast<std::uint16_t>(sign | (steps + (last + 24) * 1024))};
}

inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
