"""Asks for failures on the device before an optimizer steps.

An engine that finds out on the device that a rank did not come raises it in its next call.  After
the last backward of a step there is none, and the optimizer would take what it left behind.  That
rows did not fit, no call raises at all.
"""

from __future__ import annotations

import functools
from typing import Any

import megatron_ncclep


@functools.cache
def check_before_steps() -> None:
    """Have `megatron_ncclep.check()` called before any optimizer of this process steps.

    Every optimizer is one of torch's or holds some (each of Megatron's does: chained, distributed
    and layer-wise ones too), in every version and in a loop of the user's own, so that torch's hook
    misses none.  By then Megatron has waited for the norm of the gradients, so that the check does
    not wait.  A chained optimizer holds two or three, and nothing is queued between their steps.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Called by torch before a step.

    Raises:
        PeerError, RefusedError: what the gradients were made of is NaN.
        InputError: a routing was wrong, and what they were made of lacks some assignments.
        RowsDroppedError: what they were made of lacks rows, and `on_overflow` is "raise".
    """
    import torch

    # While a step is captured in a CUDA graph nothing runs, and nothing may be asked.
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        megatron_ncclep.check()
