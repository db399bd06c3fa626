// A tensor in the form that libnccl_ep takes.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/tensor.h"
#include "nccl/nccl.h"
#include "nccl_ep/api.h"

namespace ncclep::nccl_ep {

// NCCL's datatypes, by the number of ours; the library moves no fp64.
constexpr int kDatatypes[] = {kNcclUint8,   kNcclInt32,    kNcclInt64,
                              kNcclFloat16, kNcclBFloat16, kNcclFloat32};

// Lives as long as the call that it is an argument of.  The library refuses null even for no
// elements: `any` is passed instead.
class Argument {
 public:
  Argument(const Tensor& tensor, void* any) {
    require(tensor.dtype < ncclepFloat64, "no NCCL datatype for ", name_of(tensor.dtype));
    std::copy(tensor.begin(), tensor.end(), sizes_);
    argument_.num_dimensions = static_cast<unsigned>(tensor.ndim);
    argument_.datatype = kDatatypes[tensor.dtype];
    argument_.data = tensor.num_elements() == 0 ? any : tensor.data;
    argument_.sizes = sizes_;
  }
  Argument(const Argument&) = delete;

  TensorArgument* get() { return &argument_; }

 private:
  std::size_t sizes_[NCCLEP_MAX_DIMS];
  TensorArgument argument_;
};

}  // namespace ncclep::nccl_ep
