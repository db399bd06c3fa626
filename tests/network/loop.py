"""The test network: building `rma_loop.cpp`, and what it counts."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from build_cache import cached, run_all, version_of

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or "g++"
COUNTERS = ("puts", "bytes", "direct", "bytes_in", "refused")


def build() -> Path:
    """Compile the plugin, unless that was done; return its path, for NCCL_RMA_PLUGIN."""
    return _library("rma_loop", "libnccl-rma-loop.so")


def build_fake_driver() -> Path:
    """Compile the stand-in for CUDA's driver; return its path, for RMA_LOOP_DRIVER."""
    return _library("fake_driver", "libfake-driver.so")


def _library(source: str, name: str) -> Path:
    sources = [HERE / f"{source}.cpp", *sorted(HERE.glob("*.h"))]
    options = ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]

    def make(folder: Path) -> None:
        target = ["-shared", "-fPIC", sources[0], "-o", folder / name, "-ldl"]
        run_all([[COMPILER, *options, *target]])

    made = cached(source.replace("_", "-"), [*sources, version_of(COMPILER), *options], make)
    return made / name


def counters(plugin: Path | str) -> dict[str, int]:
    """What this process has put and received so far, by the names in `COUNTERS`."""
    values = (ctypes.c_uint64 * len(COUNTERS)).in_dll(ctypes.CDLL(str(plugin)), "rma_loop_counters")
    return dict(zip(COUNTERS, values, strict=True))


def set_fault(fault: str) -> None:
    """Let this process's links have the fault, and no other; see RMA_LOOP_FAULT in link.h."""
    os.environ.pop("RMA_LOOP_FAULT", None)
    os.environ |= {"RMA_LOOP_FAULT": fault} if fault else {}
    if ctypes.CDLL(os.environ["NCCL_RMA_PLUGIN"]).rma_loop_read_environment() != 0:
        raise ValueError(f"RMA_LOOP_FAULT={fault}")
