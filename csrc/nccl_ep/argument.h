// A tensor in the form that libnccl_ep takes.
#pragma once

#include <cstddef>
#include <vector>

#include "common/tensor.h"
#include "nccl/nccl.h"
#include "nccl_ep/api.h"

namespace ncclep::nccl_ep {

inline int datatype_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return kNcclUint8;
    case DType::kInt32:
      return kNcclInt32;
    case DType::kInt64:
      return kNcclInt64;
    case DType::kFloat16:
      return kNcclFloat16;
    case DType::kBFloat16:
      return kNcclBFloat16;
    case DType::kFloat32:
      return kNcclFloat32;
    case DType::kFloat64:
      break;  // the library moves no such data
  }
  fail("no NCCL datatype for dtype ", static_cast<int>(dtype));
}

// Lives as long as the call that it is an argument of.  The library refuses null even for no
// elements: `any` is passed instead.
class Argument {
 public:
  Argument(const Tensor& tensor, void* any) : sizes_(tensor.shape.begin(), tensor.shape.end()) {
    argument_.num_dimensions = static_cast<unsigned>(sizes_.size());
    argument_.datatype = datatype_of(tensor.dtype);
    argument_.data = tensor.num_elements() == 0 ? any : tensor.data;
    argument_.sizes = sizes_.data();
  }
  Argument(const Argument&) = delete;

  TensorArgument* get() { return &argument_; }

 private:
  std::vector<std::size_t> sizes_;
  TensorArgument argument_;
};

}  // namespace ncclep::nccl_ep
