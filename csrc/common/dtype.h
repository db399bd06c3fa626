// The dtypes that cross from Python.
#pragma once

namespace ncclep {

enum class DType { kUint8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64 };

// Bytes of an element.
constexpr int itemsize_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

// Torch's name for it.
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "no dtype";
}

}  // namespace ncclep
