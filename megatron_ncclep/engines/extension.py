"""The extension `megatron_ncclep._C`, which a package built without a CUDA toolkit lacks."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

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
