// Tensors cross from Python as pointer, shape and dtype: the extension knows nothing of torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/error.h"

namespace ncclep {

// A contiguous tensor in device memory, borrowed for the length of a call.
struct Tensor {
  void* data = nullptr;  // may be null when the tensor has no elements
  DType dtype = DType::kUint8;
  std::vector<std::int64_t> shape;

  std::int64_t num_elements() const {
    std::int64_t product = 1;
    for (std::int64_t size : shape) product *= size;
    return product;
  }
};

inline DType dtype_of(const std::string& name) {
  if (name == "torch.uint8" || name == "torch.bool") return DType::kUint8;  // a bool is 0 or 1
  if (name == "torch.int32") return DType::kInt32;
  if (name == "torch.int64") return DType::kInt64;
  if (name == "torch.float16") return DType::kFloat16;
  if (name == "torch.bfloat16") return DType::kBFloat16;
  if (name == "torch.float32") return DType::kFloat32;
  if (name == "torch.float64") return DType::kFloat64;
  fail("the native code takes no ", name, " tensors");
}

}  // namespace ncclep

namespace pybind11::detail {

// Takes anything that has torch.Tensor's data_ptr, shape, dtype and is_contiguous.
template <>
struct type_caster<ncclep::Tensor> {
  PYBIND11_TYPE_CASTER(ncclep::Tensor, const_name("Tensor"));

  bool load(handle source, bool) {
    if (!hasattr(source, "data_ptr")) return false;
    ncclep::require(source.attr("is_contiguous")().cast<bool>(),
                    "the native code takes contiguous tensors only");
    value.data = reinterpret_cast<void*>(source.attr("data_ptr")().cast<std::uintptr_t>());
    value.dtype = ncclep::dtype_of(str(source.attr("dtype")));
    value.shape.clear();
    for (handle size : source.attr("shape")) value.shape.push_back(size.cast<std::int64_t>());
    return true;
  }
};

}  // namespace pybind11::detail
