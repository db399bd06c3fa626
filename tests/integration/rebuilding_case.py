"""Counts what a process holds while it builds one model after another, on a CPU or a GPU."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import torch

# Models after which no more thread pools, caches and late imports are expected.
SETTLED = 3


def mapped() -> int:
    """How much memory this process maps that the hosts of ranks share."""
    return Path("/proc/self/maps").read_text().count("/memfd:ncclep")


def held() -> dict[str, int]:
    """What this process has of threads and descriptors, and of ours."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    # A class made in C may have a descriptor in place of its module's name.
    ours = (kind for kind in kinds if str(kind.__module__).startswith("megatron_ncc"))
    counts = Counter(kind.__name__ for kind in ours)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mapped(),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    } | {f"{name}s": number for name, number in counts.items()}


def growth(seen: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Whatever there is more of after each of the last models than after any of the first ones.

    After one of them, a busy thread of autograd's may still hold what it has worked on.
    """
    first, last = seen[:SETTLED], seen[-SETTLED:]
    most = {name: max(one.get(name, 0) for one in first) for name in seen[-1]}
    least = {name: min(one.get(name, 0) for one in last) for name in seen[-1]}
    return {name: (most[name], n) for name, n in least.items() if n > most[name]}
