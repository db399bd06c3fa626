"""The range of torch's versions that the tests run with.

Megatron-Core's is in integration/releases.py.
"""

from __future__ import annotations

import torch

OLDEST_TORCH, NEWEST_TORCH = "2.6", "2.14"


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of one of torch's versions, such as (2, 14)."""
    return tuple(map(int, version.split(".")[:2]))


def untested_torch() -> str | None:
    """Say that this torch is outside the range that the tests run with; None if it is not.

    Such a torch is not refused: it usually works, and may be the only one for a GPU.
    """
    if numbers(OLDEST_TORCH) <= numbers(torch.__version__) <= numbers(NEWEST_TORCH):
        return None
    return f"torch {torch.__version__} is not tested: {OLDEST_TORCH} to {NEWEST_TORCH} are"
