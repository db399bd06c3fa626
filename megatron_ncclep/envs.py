"""The environment: no other module reads it.

Here are the variables that are no options; those of options follow from `EpConfig` (config.py).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ncclep.errors import InputError

PREFIX = "NCCLEP_"
# Names that users may set; megatron_ncclep.engines has the engines themselves.
ENGINES = ("auto", "native", "hierarchical", "nccl_ep", "reference")
# Variables of the build and of our tests, which read them themselves.
OTHERS = ("NCCLEP_BUILD_EXTENSION", "NCCLEP_CUDA_ARCHITECTURES", "NCCLEP_TEST_PATIENCE")


def switch(text: str) -> bool:
    """Turn 1 or 0, true or false, on or off into a bool; raises ValueError for anything else."""
    values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in values:
        raise ValueError(f"not one of {', '.join(values)}")
    return values[text.lower()]


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError("not a positive number")
    return number


def rows(text: str) -> int | str:
    """A number of rows, or the text for one, which EpConfig checks."""
    try:
        return int(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class EnvVar:
    """One environment variable.

    Attributes:
        name, meaning: what it is.
        parse: raises ValueError for text that is not a value.
        default: its value when it is unset or empty.
        choices: the values that it may have; None: any.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str
    choices: tuple[Any, ...] | None = None

    def get(self) -> Any:
        """Return the parsed value, or the default when the variable is unset or empty.

        Raises:
            InputError: the text cannot be parsed; the message names variable, text and type.
        """
        text = os.environ.get(self.name, "")
        if text == "":
            return self.default
        try:
            value = self.parse(text)
            if self.choices is not None and value not in self.choices:
                raise ValueError(f"not one of {', '.join(map(str, self.choices))}")
        except ValueError as error:
            raise InputError(f"{self.name}={text!r}: {error} ({self.meaning})") from error
        return value


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
VARIABLES = {
    variable.name: variable
    for variable in (
        EnvVar("NCCLEP_AUTOLOAD", switch, True, "0: `import torch` does not load the integration"),
        EnvVar(
            "NCCLEP_IN_PLACE_OF",
            str,
            None,
            "alltoall or flex: MoE configs with this dispatcher type are built as `ncclep`",
            ("alltoall", "flex"),
        ),
        EnvVar("NCCLEP_LOG", str.upper, "INFO", "log level: debug, info, warning or error", LEVELS),
        EnvVar("NCCLEP_HOST_EXCHANGE", switch, True, "0: ranks agree without shared memory"),
        EnvVar(
            "NCCLEP_LOCAL_RANKS",
            _positive,
            None,
            "for tests: how many ranks count as one node, whatever nodes they are on",
        ),
        # Paths of the libraries and tools that engines use; if unset, engines search for them.
        EnvVar("NCCLEP_NCCL_LIBRARY", Path, None, "path of the libnccl.so.2 that engines open"),
        EnvVar(
            "NCCLEP_NCCL_EP_LIBRARY",
            str,
            None,
            "NVIDIA's libnccl_ep: nccl-extensions, transformer-engine, or the path of one",
        ),
        EnvVar("CUDA_HOME", Path, None, "folder of the CUDA toolkit (not ours: CUDA's)"),
        # NVIDIA's libnccl_ep reads these: it compiles its kernels at first use.
        EnvVar("NCCL_EP_JIT_NVCC", str, None, "the CUDA compiler (not ours: libnccl_ep's)"),
        EnvVar("NCCL_EP_JIT_SOURCE_DIR", Path, None, "its sources (not ours: libnccl_ep's)"),
        EnvVar(
            "NCCL_EP_JIT_BUILD_INCLUDE_DIR", Path, None, "NCCL's headers (not ours: libnccl_ep's)"
        ),
        EnvVar("NCCL_EP_JIT_CACHE_DIR", Path, None, "compiled kernels (not ours: libnccl_ep's)"),
        # libnccl_ep reads these when it makes a group.
        EnvVar(
            "NCCL_EP_HT_EM_PULL_PUSH",
            switch,
            False,
            "1: dispatch pulls and combine pushes (not ours: libnccl_ep's)",
        ),
        EnvVar(
            "NCCL_EP_HT_EM_AG_SCAN_MODE",
            switch,
            None,
            "1: an expert's rows in a fixed order (not ours: libnccl_ep's)",
        ),
    )
}


def get(name: str) -> Any:
    """Return the typed value of the environment variable `name`, which must be in `VARIABLES`."""
    return VARIABLES[name].get()


def unknown(names: Iterable[str]) -> dict[str, str]:
    """Variables of the environment that look like ours but that nothing reads.

    `names`: of those that are read.  Returns name -> a message, with the most similar known name.
    """
    known = {name.removeprefix(PREFIX): name for name in (*names, *OTHERS)}
    found = {}
    for name in sorted(os.environ):
        short = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and short not in known:
            near = difflib.get_close_matches(short, known, n=1)
            remedy = f"did you mean {known[near[0]]}?" if near else "`ncclep env` lists those"
            found[name] = f"{name} is not a variable that ncclep reads: {remedy}"
    return found
