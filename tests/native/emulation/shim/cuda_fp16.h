// fp16 is not emulated: its kernels compile and are not run.
#pragma once

#include <cuda_runtime.h>

struct __half {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float2 __half22float2(__half2) { emu::fail("fp16"); }
inline __half2 __floats2half2_rn(float, float) { emu::fail("fp16"); }
