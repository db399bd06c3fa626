// The dtypes that cross from Python and from C, which the C interface lists.
#pragma once

#include "include/ncclep.h"

namespace ncclep {

using DType = ncclepDataType_t;

struct DTypeInfo {
  int itemsize;      // bytes of an element
  const char* name;  // torch's
};

// By number.
constexpr DTypeInfo kDTypes[] = {{1, "uint8"},    {4, "int32"},   {8, "int64"},  {2, "float16"},
                                 {2, "bfloat16"}, {4, "float32"}, {8, "float64"}};
static_assert(sizeof(kDTypes) / sizeof(*kDTypes) == ncclepNumTypes && ncclepFloat64 == 6 &&
              ncclepInt64 == 2 && ncclepBfloat16 == 4);

constexpr bool is_dtype(int number) { return 0 <= number && number < ncclepNumTypes; }
// 0 of what is no dtype.
constexpr int itemsize_of(DType dtype) { return is_dtype(dtype) ? kDTypes[dtype].itemsize : 0; }
constexpr const char* name_of(DType dtype) {
  return is_dtype(dtype) ? kDTypes[dtype].name : "no dtype";
}

}  // namespace ncclep
