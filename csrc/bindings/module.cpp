// The extension megatron_ncclep._C: the Python bindings of the native code, and nothing else.
#include "bindings/bindings.h"
#include "common/error.h"

namespace py = pybind11;

namespace {

// One string, because setup.py searches the binary for it: a compiler may embed a string as short
// as "13.0" in its instructions.
[[gnu::used]] const char kBuiltWith[] =
    "CUDA " NCCLEP_CUDA_VERSION " for " NCCLEP_ARCHITECTURES " with NCCL " NCCLEP_NCCL_VERSION;

py::dict build_info() {
  py::dict info;
  info["cuda"] = NCCLEP_CUDA_VERSION;
  // Whose device headers the kernels over a network were compiled with; empty: there are none.
  info["nccl"] = NCCLEP_NCCL_VERSION;
  info["architectures"] = py::str(NCCLEP_ARCHITECTURES).attr("split")(" ");
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  // The package's own exception types; pybind11 holds a reference for the life of the process.
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const ncclep::PeerError& error) {
      py::object type = py::module_::import("megatron_ncclep.errors").attr("PeerError");
      PyErr_SetString(type.ptr(), error.what());
    } catch (const ncclep::UsageError& error) {
      py::object type = py::module_::import("megatron_ncclep.errors").attr("InputError");
      PyErr_SetString(type.ptr(), error.what());
    } catch (const ncclep::Error& error) {
      py::object type = py::module_::import("megatron_ncclep.errors").attr("LibraryError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  module.def("build_info", &build_info);
  ncclep::bindings::bind_libraries(module);
  ncclep::bindings::bind_native(module);
  ncclep::bindings::bind_kernels(module);
  ncclep::bindings::bind_fp8_experts(module);
}
