"""The range of torch's versions that the tests run with.

Megatron-Core's is in integration/releases.py.
"""

from __future__ import annotations

import torch

OLDEST_TORCH, NEWEST_TORCH = "2.6", "2.14"


def untested_torch() -> str | None:
    """Say that this torch is outside the range that the tests run with; None if it is not.

    Such a torch is not refused: it usually works, and may be the only one for a GPU.
    """
    oldest, here, newest = (
        tuple(map(int, text.split(".")[:2]))
        for text in (OLDEST_TORCH, torch.__version__, NEWEST_TORCH)
    )
    if oldest <= here <= newest:
        return None
    return f"torch {torch.__version__} is not tested: {OLDEST_TORCH} to {NEWEST_TORCH} are"
