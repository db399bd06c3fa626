// Helpers that the binding files share, and the functions with which each adds to the module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace ncclep::bindings {

// Calls that may wait for other ranks release the interpreter's lock.
using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;

// Lets Ctrl-C end a long wait; called without the interpreter's lock.
inline void raise_signals() {
  pybind11::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// The host exchange, NCCL and libnccl_ep: libraries.cpp.
void bind_libraries(pybind11::module_& module);

// The native engine's groups, plans and steps, and its low-latency mode: native.cpp.
void bind_native(pybind11::module_& module);

// Kernels and copies without a group, for routes, messages and measurements: kernels.cpp.
void bind_kernels(pybind11::module_& module);

// Products and quantisation in FP8, if the extension was built for Hopper: fp8_experts.cpp.
void bind_fp8_experts(pybind11::module_& module);

}  // namespace ncclep::bindings
