"""The extension `megatron_ncclep._C`, which a package built without a CUDA toolkit lacks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from types import ModuleType

import torch

NAME = "megatron_ncclep._C"


def obstacle() -> str | None:
    """Say why there is no extension and what would help; None if it can be used."""
    if importlib.util.find_spec(NAME) is None:
        return (
            "this installation has no extension: install the package again where a CUDA toolkit is "
            "(CUDA_HOME, or nvcc on PATH)"
        )
    try:
        importlib.import_module(NAME)
    except ImportError as error:
        return f"the extension does not load: {error}; install the package again on this machine"
    return None


def load() -> ModuleType:
    """Return the extension.

    Raises:
        ImportError: there is none, or it does not load; `obstacle` says so in words.
    """
    return importlib.import_module(NAME)


def current_stream() -> int:
    """Return torch's current CUDA stream as the extension's functions take it."""
    stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return stream


class StreamKeeper:
    """Keeps tensors for kernels on torch's current stream of one GPU.

    torch makes an object for the current stream at each question, from the device's name on, in
    longer than a kernel takes to be launched; here each stream gets one, once.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._streams: dict[int, torch.cuda.Stream] = {}

    def keep(self, *tensors: torch.Tensor | None) -> int:
        """Return what `current_stream` does, on which a kernel is about to use `tensors`.

        Their memory, if it belongs to another stream, is not given to anybody else before the
        kernel is done with it, even when the caller drops them at once.
        """
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._index)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
        return handle


def architectures() -> list[str]:
    """Return the GPU architectures that the extension has code for, such as sm_90a."""
    names: list[str] = load().build_info()["architectures"]
    return names


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether machine code for `architecture`, sm_90a say, runs on a GPU of capability major.minor.

    It runs on later GPUs of the same major version, unless a letter ties it to one.
    """
    found = re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", architecture)
    if found is None or int(found[1]) != major:
        return False
    return int(found[2]) == minor if found[3] == "a" else int(found[2]) <= minor


def has_code_for(major: int, minor: int) -> bool:
    """Whether the extension runs on a GPU of capability major.minor."""
    return any(runs_on(name, major, minor) for name in architectures())


def architecture_of(major: int, minor: int) -> str:
    """Return what NCCLEP_CUDA_ARCHITECTURES has to name for a GPU of capability major.minor."""
    return f"{major}{minor}{'a' if major >= 9 else ''}"
