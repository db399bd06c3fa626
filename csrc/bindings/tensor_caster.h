// Converts a tensor from Python to a Tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/tensor.h"

namespace py = pybind11;

namespace ncclep::bindings {

inline DType dtype_of(const std::string& name) {
  if (name == "torch.bool") return ncclepUint8;  // it is 0 or 1
  for (int number = 0; number < ncclepNumTypes; ++number) {
    if (name == std::string("torch.") + kDTypes[number].name) return static_cast<DType>(number);
  }
  fail("the native code takes no ", name, " tensors");
}

// Reads anything that has torch.Tensor's data_ptr, shape, dtype and is_contiguous.  A layer passes
// dozens of tensors, so attribute names are interned once and dtypes are cached by object.
class TensorReader {
 public:
  // False for anything else.
  static bool read(py::handle source, Tensor& tensor) {
    static const Names names;
    static PyTypeObject* known = nullptr;  // a type whose objects have them
    if (Py_TYPE(source.ptr()) != known && !PyObject_HasAttr(source.ptr(), names.data_ptr)) {
      return false;
    }
    require(call(source, names.is_contiguous).ptr() == Py_True,
            "the native code takes contiguous tensors only");
    tensor.data = reinterpret_cast<void*>(PyLong_AsSize_t(call(source, names.data_ptr).ptr()));
    raise_pending();
    tensor.dtype = dtype_at(attribute(source, names.dtype));
    const py::object shape = attribute(source, names.shape);
    if (!PyTuple_Check(shape.ptr())) throw py::type_error("a tensor's shape must be a tuple");
    const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
    require(ndim <= NCCLEP_MAX_DIMS, "a tensor has more than ", NCCLEP_MAX_DIMS, " dimensions");
    tensor.ndim = static_cast<int>(ndim);
    for (Py_ssize_t i = 0; i < ndim; ++i) {
      tensor.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
      raise_pending();
    }
    if (known == nullptr) {
      known = Py_TYPE(source.ptr());
      Py_INCREF(known);
    }
    require_tensor(tensor);
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
  static DType dtype_at(const py::object& dtype) {
    static std::vector<std::pair<PyObject*, DType>> known;
    for (const auto& [object, found] : known) {
      if (object == dtype.ptr()) return found;
    }
    const DType found = dtype_of(py::str(dtype));
    known.emplace_back(dtype.inc_ref().ptr(), found);
    return found;
  }
};

}  // namespace ncclep::bindings

namespace pybind11::detail {

template <>
struct type_caster<ncclep::Tensor> {
  PYBIND11_TYPE_CASTER(ncclep::Tensor, const_name("Tensor"));

  bool load(handle source, bool) {
    value = ncclep::Tensor();
    return ncclep::bindings::TensorReader::read(source, value);
  }
};

}  // namespace pybind11::detail
