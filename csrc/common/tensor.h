// Tensors cross from Python as pointer, shape and dtype: the extension knows nothing of torch.
#pragma once

#include <cstdint>
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

// Throws unless shape and pointer describe a possible tensor: no negative size, no more elements
// than memory can hold, and a pointer to them at a multiple of the dtype's size.
inline void require_tensor(const Tensor& tensor) {
  const int itemsize = itemsize_of(tensor.dtype);
  std::int64_t num_bytes = itemsize;
  bool is_empty = false;
  for (const std::int64_t size : tensor.shape) {
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

}  // namespace ncclep
