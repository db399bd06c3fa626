"""Checks for failures on the device before every optimizer step.

An engine whose device notices that a rank did not come raises in its next call.  After the last
backward of a step there is no such call, and the optimizer would use invalid gradients.  Dropped
rows are not reported by any call at all.
"""

from __future__ import annotations

import functools
from typing import Any

import megatron_ncclep
from megatron_ncclep.integration.patching import raise_failure, replaces
from megatron_ncclep.integration.releases import MEGATRON


@functools.cache
def check_before_steps() -> None:
    """Call `megatron_ncclep.check()` before every optimizer step of this process.

    Every optimizer is one of torch's or wraps some of them (all of Megatron's do, including
    chained, distributed and layer-wise ones), in every version and in users' own loops, so torch's
    hook misses none.  By then Megatron has waited for the norm of the gradients, so the check does
    not wait.  A chained optimizer holds two or three, and nothing is queued between their steps.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Called by torch before a step.

    Raises:
        PeerError, RefusedError: the gradients were computed from NaN.
        InputError: a routing was wrong, so the gradients lack some assignments.
        RowsDroppedError: the gradients lack dropped rows, and `on_overflow` is "raise".
        IntegrationError: a module imported after the model was built could not be changed.
    """
    import torch

    raise_failure(MEGATRON)

    # While a step is being captured in a CUDA graph nothing runs, and queries are not allowed.
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        megatron_ncclep.check()


@replaces("OptimizerCudaGraphWrapper.__call__", ["self"])
def change_optimizer_graph(original: Any) -> Any:
    """Check before optimizer steps in CUDA graphs (`--optimizer-cuda-graph`): they run no hooks."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        megatron_ncclep.check()  # does nothing where no layer has our dispatcher
        return original(self, *args, **kwargs)

    return call
