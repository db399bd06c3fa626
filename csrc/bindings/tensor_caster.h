// Takes a Tensor from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/tensor.h"

namespace ncclep {

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

// Takes anything that has torch.Tensor's data_ptr, shape, dtype and is_contiguous.  A layer passes
// dozens of tensors, so attribute names are interned once and dtypes are cached by object.
template <>
struct type_caster<ncclep::Tensor> {
  PYBIND11_TYPE_CASTER(ncclep::Tensor, const_name("Tensor"));

  bool load(handle source, bool) {
    static const Names names;
    if (!PyObject_HasAttr(source.ptr(), names.data_ptr)) return false;
    ncclep::require(call(source, names.is_contiguous).ptr() == Py_True,
                    "the native code takes contiguous tensors only");
    value.data = reinterpret_cast<void*>(PyLong_AsSize_t(call(source, names.data_ptr).ptr()));
    raise_pending();
    value.dtype = dtype_of(attribute(source, names.dtype));
    const object shape = attribute(source, names.shape);
    if (!PyTuple_Check(shape.ptr())) throw type_error("a tensor's shape must be a tuple");
    value.shape.clear();
    for (handle size : reinterpret_borrow<tuple>(shape)) {
      value.shape.push_back(PyLong_AsLongLong(size.ptr()));
      raise_pending();
    }
    ncclep::require_tensor(value);
    return true;
  }

 private:
  struct Names {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* shape = PyUnicode_InternFromString("shape");
  };

  static object checked(PyObject* result) {
    if (result == nullptr) throw error_already_set();
    return reinterpret_steal<object>(result);
  }
  // Python could not convert the number.
  static void raise_pending() {
    if (PyErr_Occurred() != nullptr) throw error_already_set();
  }
  static object call(handle source, PyObject* name) {
    return checked(PyObject_CallMethodNoArgs(source.ptr(), name));
  }
  static object attribute(handle source, PyObject* name) {
    return checked(PyObject_GetAttr(source.ptr(), name));
  }

  // torch has one object for each dtype, which lives as long as the process.
  static ncclep::DType dtype_of(const object& dtype) {
    static std::vector<std::pair<PyObject*, ncclep::DType>> known;
    for (const auto& [object, found] : known) {
      if (object == dtype.ptr()) return found;
    }
    const ncclep::DType found = ncclep::dtype_of(str(dtype));
    known.emplace_back(dtype.inc_ref().ptr(), found);
    return found;
  }
};

}  // namespace pybind11::detail
