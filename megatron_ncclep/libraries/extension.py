"""The extension `megatron_ncclep._C`, which a package built without a CUDA toolkit lacks."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import re
from types import ModuleType

import torch

NAME = "megatron_ncclep._C"
# The first release of NVIDIA's driver for each major version of CUDA, of those that we build with.
OLDEST_DRIVER = {12: "525.60", 13: "580.65"}


def unavailable_reason() -> str | None:
    """Say why there is no extension and what would help; None if it can be used."""
    if importlib.util.find_spec(NAME) is None:
        return (
            "this installation has no extension: install the package again on a machine with a "
            "CUDA toolkit (CUDA_HOME, or nvcc on PATH)"
        )
    try:
        importlib.import_module(NAME)
    except ImportError as error:
        return f"the extension does not load: {error}; install the package again on this machine"
    return None


def load() -> ModuleType:
    """Return the extension.

    Raises:
        ImportError: there is none, or it does not load; `unavailable_reason` has the text for
        users.
    """
    return importlib.import_module(NAME)


@functools.cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """Return the extension if its kernels run on `device`; looked up once for each device."""
    if device.type != "cuda" or unavailable_reason() is not None:
        return None
    if gpu_problem("this GPU", *torch.cuda.get_device_capability(device)) is not None:
        return None
    return load()


def limit(name: str) -> int | None:
    """A limit of the kernels, such as MAX_TOP_K; None without the extension."""
    if unavailable_reason() is not None:
        return None
    most: int = getattr(load(), name)
    return most


def current_stream() -> int:
    """Return torch's current CUDA stream in the form that the extension's functions take."""
    stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return stream


class StreamKeeper:
    """Keeps tensors for kernels on torch's current stream of one GPU; on a CPU it does nothing.

    At each query for the current stream torch makes a new object, which takes longer than launching
    a kernel; here each stream gets one object, once.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu, self._index = device.type == "cuda", device.index
        self._streams: dict[int, torch.cuda.Stream] = {}

    def keep(self, *tensors: torch.Tensor | None) -> int:
        """Return `current_stream()`, on which a kernel is about to use `tensors`.

        If their memory belongs to another stream, it is not reused before the kernel is done with
        it, even if the caller drops the tensors at once.  Tensors on the host are skipped.
        """
        if not self._is_gpu:
            return 0
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._index)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)
        return handle


def architectures() -> list[str]:
    """Return the extension's architectures: machine code (sm_90, ...) or PTX (compute_90, ...)."""
    names: list[str] = load().build_info()["architectures"]
    return names


def cuda_version() -> tuple[int, int]:
    """Return the version of the extension's CUDA toolkit, and so of the runtime inside it."""
    major, minor = load().build_info()["cuda"].split(".")
    return int(major), int(minor)


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA that this machine's driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether code for `architecture` runs on a GPU of capability major.minor.

    Machine code (sm_90) runs on later GPUs of the same major version, PTX (compute_90) on all later
    ones.  The letter a ties either to that one GPU, f to its major version.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    kind, letter = found[1], found[4]
    own = int(found[2]), int(found[3])
    if letter == "a":
        return own == (major, minor)
    same_major = own[0] == major
    return own <= (major, minor) and (same_major or (kind == "compute" and not letter))


def gpu_problem(gpu: str, major: int, minor: int) -> str | None:
    """Say why the extension's kernels do not run on a GPU of this machine, and what would help."""
    names = architectures()
    fitting = [name for name in names if runs_on(name, major, minor)]
    if not fitting:
        return (
            f"the extension is built for {', '.join(names)}, which {gpu} (compute capability "
            f"{major}.{minor}) does not run: install the package again without "
            "NCCLEP_CUDA_ARCHITECTURES in the environment"
        )
    return driver_problem(is_compiled=any(name.startswith("sm_") for name in fitting))


def driver_problem(*, is_compiled: bool = True) -> str | None:
    """Say why the driver is too old for the extension, and what would help; None if it is not.

    The CUDA runtime in the extension runs with every driver of its major version.  The driver's
    compiler does not accept PTX of a newer toolkit, not even of a newer minor version.

    Args:
        is_compiled: there is machine code for the GPU, so the driver compiles nothing.
    """
    served = driver_version()
    if served is None:
        return None
    built = cuda_version()
    needed = (built[0], 0) if is_compiled else built
    if served >= needed:
        return None
    release = OLDEST_DRIVER.get(built[0])
    return (
        f"the extension is built with CUDA {_dotted(built)}"
        f"{'' if is_compiled else ' and has only PTX for this GPU'}, which needs a driver for CUDA "
        f"{_dotted(needed)}{f' ({release})' if is_compiled and release else ''} or newer, and "
        f"this machine's supports CUDA up to {_dotted(served)}: update the driver, or install the "
        f"package again with CUDA_HOME naming a toolkit of CUDA {_dotted(served)} or older"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
