// Tensors cross from Python and from C as pointer, shape and dtype: there is no torch here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "common/c_struct.h"
#include "common/dtype.h"

namespace ncclep {

// A contiguous tensor in device memory, borrowed for the length of a call: the C interface's.
struct Tensor : ncclepTensor_t {
  Tensor() : ncclepTensor_t NCCLEP_TENSOR_INIT {}
  explicit Tensor(const ncclepTensor_t& given) : ncclepTensor_t(given) {}

  const std::int64_t* begin() const { return shape; }
  const std::int64_t* end() const { return shape + ndim; }
  std::int64_t num_elements() const {
    std::int64_t product = 1;
    for (const std::int64_t each : *this) product *= each;
    return product;
  }
  bool has_shape(std::initializer_list<std::int64_t> sizes) const {
    return std::equal(begin(), end(), sizes.begin(), sizes.end());
  }
  bool is(DType its, std::initializer_list<std::int64_t> sizes) const {
    return dtype == its && has_shape(sizes);
  }
  bool has_shape_of(const Tensor& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }
};

// Throws unless shape and pointer describe a possible tensor: no negative size, no more elements
// than memory can hold, and a pointer to them at a multiple of the dtype's size.
inline void require_tensor(const Tensor& tensor) {
  const int itemsize = itemsize_of(tensor.dtype);
  std::int64_t num_bytes = itemsize;
  bool is_empty = false;
  for (const std::int64_t size : tensor) {
    require(size >= 0, "a tensor has a negative size, ", size);
    is_empty = is_empty || size == 0;
    // Also when another size is zero, so that products of some of the sizes cannot overflow.
    require(size == 0 || !__builtin_mul_overflow(num_bytes, size, &num_bytes),
            "a tensor has more elements than any memory");
  }
  if (is_empty) return;
  require(tensor.data != nullptr, "a tensor with elements has no memory");
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % itemsize == 0,
          "a tensor with elements of ", itemsize, " bytes starts at ", tensor.data,
          ", not a multiple of that");
}

// The tensor that a caller passed as the argument `name`.
inline Tensor tensor_at(const ncclepTensor_t* given, const char* name) {
  const Tensor found(read(given, name));
  require(is_dtype(found.dtype), "dtype ", static_cast<int>(found.dtype),
          ": one of ncclepDataType_t");
  require(0 <= found.ndim && found.ndim <= NCCLEP_MAX_DIMS, name, ": ", found.ndim,
          " dimensions: at most ", NCCLEP_MAX_DIMS);
  require_tensor(found);
  return found;
}

// A stream's handle as the C interface has it, as a number.
inline std::uintptr_t number_of(void* stream) { return reinterpret_cast<std::uintptr_t>(stream); }

inline std::optional<Tensor> optional_tensor(const ncclepTensor_t* given, const char* name) {
  if (given == nullptr) return std::nullopt;
  return tensor_at(given, name);
}

}  // namespace ncclep
