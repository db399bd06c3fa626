// Converts a tensor from Python to a Tensor, or to the C interface's form.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/tensor.h"
#include "include/ncclep.h"

namespace py = pybind11;

namespace ncclep {

inline DType dtype_of(const std::string& name) {
  if (name == "torch.uint8" || name == "torch.bool") return ncclepUint8;  // a bool is 0 or 1
  if (name == "torch.int32") return ncclepInt32;
  if (name == "torch.int64") return ncclepInt64;
  if (name == "torch.float16") return ncclepFloat16;
  if (name == "torch.bfloat16") return ncclepBfloat16;
  if (name == "torch.float32") return ncclepFloat32;
  if (name == "torch.float64") return ncclepFloat64;
  fail("the native code takes no ", name, " tensors");
}

}  // namespace ncclep

namespace ncclep::bindings {

// Reads anything that has torch.Tensor's data_ptr, shape, dtype and is_contiguous.  A layer passes
// dozens of tensors, so attribute names are interned once and dtypes are cached by object.
class TensorReader {
 public:
  // False for anything else; `push` takes the sizes one by one.
  template <typename Push>
  static bool read(py::handle source, void*& data, DType& dtype, Push&& push) {
    static const Names names;
    static PyTypeObject* known = nullptr;  // a type whose objects have them
    if (Py_TYPE(source.ptr()) != known && !PyObject_HasAttr(source.ptr(), names.data_ptr)) {
      return false;
    }
    require(call(source, names.is_contiguous).ptr() == Py_True,
            "the native code takes contiguous tensors only");
    data = reinterpret_cast<void*>(PyLong_AsSize_t(call(source, names.data_ptr).ptr()));
    raise_pending();
    dtype = dtype_of(attribute(source, names.dtype));
    const py::object shape = attribute(source, names.shape);
    if (!PyTuple_Check(shape.ptr())) throw py::type_error("a tensor's shape must be a tuple");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.ptr()); ++i) {
      const std::int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
      raise_pending();
      push(size);
    }
    if (known == nullptr) {
      known = Py_TYPE(source.ptr());
      Py_INCREF(known);
    }
    return true;
  }

 private:
  struct Names {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* shape = PyUnicode_InternFromString("shape");
  };

  static py::object checked(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }
  // Python could not convert the number.
  static void raise_pending() {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }
  static py::object call(py::handle source, PyObject* name) {
    return checked(PyObject_CallMethodNoArgs(source.ptr(), name));
  }
  static py::object attribute(py::handle source, PyObject* name) {
    return checked(PyObject_GetAttr(source.ptr(), name));
  }

  // torch has one object for each dtype, which lives as long as the process.
  static DType dtype_of(const py::object& dtype) {
    static std::vector<std::pair<PyObject*, DType>> known;
    for (const auto& [object, found] : known) {
      if (object == dtype.ptr()) return found;
    }
    const DType found = ncclep::dtype_of(py::str(dtype));
    known.emplace_back(dtype.inc_ref().ptr(), found);
    return found;
  }
};

// A tensor in the form of the C interface; NULL for None.
class Passed {
 public:
  operator const ncclepTensor_t*() const { return is_there_ ? &tensor_ : nullptr; }

  bool load(py::handle source) {
    if (source.is_none()) return true;
    DType dtype = ncclepUint8;
    const auto push = [this](std::int64_t size) {
      require(tensor_.ndim < NCCLEP_MAX_DIMS, "a tensor has more than ", NCCLEP_MAX_DIMS,
              " dimensions");
      tensor_.shape[tensor_.ndim++] = size;
    };
    is_there_ = TensorReader::read(source, tensor_.data, dtype, push);
    tensor_.dtype = static_cast<ncclepDataType_t>(dtype);
    return is_there_;
  }

 private:
  bool is_there_ = false;
  ncclepTensor_t tensor_ = NCCLEP_TENSOR_INIT;
};

}  // namespace ncclep::bindings

namespace pybind11::detail {

template <>
struct type_caster<ncclep::Tensor> {
  PYBIND11_TYPE_CASTER(ncclep::Tensor, const_name("Tensor"));

  bool load(handle source, bool) {
    value.shape.clear();
    const auto push = [this](std::int64_t size) { value.shape.push_back(size); };
    if (!ncclep::bindings::TensorReader::read(source, value.data, value.dtype, push)) return false;
    ncclep::require_tensor(value);
    return true;
  }
};

template <>
struct type_caster<ncclep::bindings::Passed> {
  PYBIND11_TYPE_CASTER(ncclep::bindings::Passed, const_name("Tensor | None"));

  bool load(handle source, bool) {
    value = {};
    return value.load(source);
  }
};

}  // namespace pybind11::detail
