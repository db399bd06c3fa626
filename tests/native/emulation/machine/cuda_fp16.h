// fp16 for the emulator, rounded to nearest even.
#pragma once

#include <cuda_runtime.h>

using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {static_cast<__half>(x), static_cast<__half>(y)};
}
