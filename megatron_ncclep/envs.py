"""List the environment variables that ncclep reads, their current values, and what they mean.

An option given in code or on the command line takes precedence over its variable.  Any other
variable whose name begins with NCCLEP_ causes a warning that names it: nothing reads it.
"""

# No other module reads the environment.

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable
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


def _engine(text: str) -> str:
    if text not in ENGINES:
        raise ValueError(f"not one of {', '.join(ENGINES)}")
    return text


def _log_level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("not one of debug, info, warning, error")
    return text.upper()


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
    """One environment variable; `parse` raises ValueError for text that is not a value."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str

    def get(self) -> Any:
        """Return the parsed value, or the default when the variable is unset or empty.

        Raises:
            InputError: the text cannot be parsed; the message names variable, text and type.
        """
        text = os.environ.get(self.name, "")
        if text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise InputError(f"{self.name}={text!r}: {error} ({self.meaning})") from error


VARIABLES = {
    variable.name: variable
    for variable in (
        EnvVar("NCCLEP_AUTOLOAD", switch, True, "0: `import torch` does not load the integration"),
        EnvVar("NCCLEP_LOG", _log_level, "INFO", "log level: debug, info, warning or error"),
        # The defaults of EpConfig's options; a value given in code or on the command line wins.
        EnvVar("NCCLEP_ENGINE", _engine, None, "engine name, as --ncclep-engine"),
        EnvVar("NCCLEP_ALIGNMENT", int, None, "an expert's block is padded to a multiple of this"),
        EnvVar("NCCLEP_MAX_RECV_ROWS", rows, None, "static mode: rows of the dispatched tensor"),
        EnvVar("NCCLEP_MAX_RECV_GIB", float, None, "with auto: most GiB of the dispatched tensor"),
        EnvVar("NCCLEP_ON_OVERFLOW", str, None, "drop, raise or rerun when rows do not fit"),
        EnvVar("NCCLEP_NUM_SMS", int, None, "SMs that the engine's kernels may use"),
        EnvVar("NCCLEP_NETWORK_CHUNKS", int, None, "chunks in which rows cross the network"),
        EnvVar("NCCLEP_EXPERTS", str, None, "megatron, grouped or auto: how experts compute"),
        EnvVar("NCCLEP_TIMEOUT_S", float, None, "seconds that a rank waits for the others"),
        EnvVar("NCCLEP_FIRST_TIMEOUT_S", float, None, "the same in the first step"),
        EnvVar("NCCLEP_METRICS_INTERVAL", int, None, "steps between two reports; 0: none"),
        EnvVar("NCCLEP_INFERENCE_TOKENS", int, None, "most tokens of a rank in low-latency mode"),
        EnvVar("NCCLEP_CHECK_CALLS", switch, None, "1: the ranks' hosts agree in every call"),
        EnvVar("NCCLEP_GRADIENT_AVERAGING", str, None, "mean or a2sgd: how gradients are averaged"),
        EnvVar("NCCLEP_RESYNC_INTERVAL", int, None, "steps between weight averages; 0: none"),
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


def unknown() -> dict[str, str]:
    """Variables of the environment that look like ours but that nothing reads.

    Returns:
        name -> a message about it, with the most similar known name.
    """
    known = {name.removeprefix(PREFIX): name for name in (*VARIABLES, *OTHERS)}
    found = {}
    for name in sorted(os.environ):
        short = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and short not in known:
            near = difflib.get_close_matches(short, known, n=1)
            remedy = f"did you mean {known[near[0]]}?" if near else "`ncclep env` lists those"
            found[name] = f"{name} is not a variable that ncclep reads: {remedy}"
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`ncclep env` takes no arguments."""


def main(args: argparse.Namespace) -> int:
    """Print the table of variables with their current values."""
    width = max(len(name) for name in VARIABLES)
    for variable in VARIABLES.values():
        value = variable.get()
        shown = "not set" if value is None else str(value)
        print(f"{variable.name:{width}}  {shown:8}  {variable.meaning}")
    return 0
