"""The test network: building it, and what it counts."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from build_cache import cached, run_all, version_of

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or "g++"
COUNTERS = ("puts", "bytes", "direct", "bytes_in", "refused")
NET_COUNTERS = ("sends", "bytes", "direct")


def build() -> Path:
    """Compile the plugin, unless that was done.

    Return its path, for NCCL_RMA_PLUGIN; see also `variables_of_messages`.
    """
    name = "libnccl-rma-loop.so"
    sources = [HERE / file for file in ("rma_loop.cpp", "net_loop.cpp")]
    options = ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]

    def make(folder: Path) -> None:
        target = ["-shared", "-fPIC", *sources, "-o", folder / name, "-ldl", "-pthread"]
        run_all([[COMPILER, *options, *target]])

    inputs = [*sources, *sorted(HERE.glob("*.h")), version_of(COMPILER), *options]
    return cached(Path(name).stem, inputs, make) / name


def variables_of_messages(plugin: Path) -> dict[str, str]:
    """What makes NCCL's own messages between hosts go over the same links (see nic.h)."""
    return {
        "NCCL_NET_PLUGIN": str(plugin),
        "NCCL_NET_GDR_LEVEL": "SYS",
        "NCCL_NET_GDR_READ": "1",
        "NCCL_P2P_NET_CHUNKSIZE": str(1 << 20),
    }


def counters(plugin: Path | str) -> dict[str, int]:
    """What this process has put and received so far, by the names in `COUNTERS`."""
    return _counted(plugin, "rma_loop_counters", COUNTERS)


def net_counters(plugin: Path | str) -> dict[str, int]:
    """What this process has sent so far as NCCL's network, by the names in `NET_COUNTERS`."""
    return _counted(plugin, "net_loop_counters", NET_COUNTERS)


def _counted(plugin: Path | str, symbol: str, names: tuple[str, ...]) -> dict[str, int]:
    values = (ctypes.c_uint64 * len(names)).in_dll(ctypes.CDLL(str(plugin)), symbol)
    return dict(zip(names, values, strict=True))


def set_fault(fault: str, receives: int = 8) -> None:
    """Let this process's links have the fault, and no other; see RMA_LOOP_FAULT in link.h.

    `receives`: RMA_LOOP_RECEIVES there.
    """
    os.environ["RMA_LOOP_RECEIVES"] = str(receives)
    os.environ.pop("RMA_LOOP_FAULT", None)
    os.environ |= {"RMA_LOOP_FAULT": fault} if fault else {}
    if ctypes.CDLL(os.environ["NCCL_RMA_PLUGIN"]).rma_loop_read_environment() != 0:
        raise ValueError(f"RMA_LOOP_FAULT={fault}, RMA_LOOP_RECEIVES={receives}")
