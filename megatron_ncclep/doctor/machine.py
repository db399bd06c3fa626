"""Machine and versions as plain data, for stored results."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_ncclep.libraries import nccl_ep, search
from megatron_ncclep.ranks import topology
from megatron_ncclep.version import __version__

PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "nccl-extensions",
    "deep-ep",
)
DRIVER = Path("/proc/driver/nvidia/version")


def machine(device: str, ranks: int) -> dict[str, Any]:
    """The devices of this machine as plain data, and the number of `ranks` that share one."""
    described: dict[str, Any] = {
        "device": device,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        driver = DRIVER.read_text() if DRIVER.is_file() else ""
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", driver)
        described |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "ranks_per_gpu": topology.most_ranks_per_gpu(ranks),
            "sms": properties.multi_processor_count,
            "driver": found[1] if found else None,
        }
    return described


def versions(device: str) -> dict[str, str | None]:
    """Versions by name; None for packages that are not installed."""
    found: dict[str, str | None] = {
        "megatron_ncclep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "libnccl_ep": None,
        **dict.fromkeys(PACKAGES),
    }
    if device == "cuda":
        if nccl := search.loaded_nccl():
            found["nccl"] = search.version_text(nccl.version)
        if library := nccl_ep.find_nccl_ep():
            found["libnccl_ep"] = f"{search.version_text(library.version)} ({library.found})"
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
