// The dtypes that cross from Python.
#pragma once

namespace ncclep {

enum class DType { kUint8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32 };

}  // namespace ncclep
