"""A limit of static mode that follows the load: `max_recv_rows="auto"`.

All loads and limits here are thousandths of a balanced load, on the rank and in the layer with the
largest one.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import Any

import torch

from megatron_ncclep.config import AUTO_START

# More than any rank can have.
MOST_LOAD = 10**9
# A limit is this many times the largest load of the last steps when it is set,
HEADROOM = 1.15
# and lowered when it is more than this many times that load.
MOST = 1.3
# The number of last steps.
WINDOW = 100
# Reruns among them after which it pays to capture the graph of the iteration again: that takes some
# steps without a graph, and so does each rerun.
PATIENCE = 2


class FollowedLimit:
    """The limit of one model's layers.  The same on all ranks, which learn the same loads.

    Example: after a start with 1250, a step has a load of 1600 and is run again.  Without a graph
    the limit, `factor`, is 1840 from the next step on; with one, after the second such step.  When
    the largest load of the last 100 steps is 1200, it is lowered to 1380.
    """

    def __init__(self) -> None:
        self.factor = AUTO_START
        self._loads: deque[int] = deque(maxlen=WINDOW)
        self._reruns: deque[bool] = deque(maxlen=WINDOW)

    def after_step(self, load: int, is_rerun: bool, ceiling: int, holds_graph: bool) -> str | None:
        """Take note of a step; what to log if this changes the limit.

        Args:
            load: the largest of the step.
            is_rerun: it was run again.
            ceiling: the largest limit that may be set.
            holds_graph: a CUDA graph has to be captured again when the limit changes.
        """
        self._loads.append(load)
        self._reruns.append(is_rerun)
        largest, before, reruns = max(self._loads), self.factor, sum(self._reruns)
        factor = min(max(1, -int(-largest * HEADROOM // 1)), ceiling)
        is_short = is_rerun and factor > before and reruns >= (PATIENCE if holds_graph else 1)
        is_known = len(self._loads) == WINDOW
        is_long = before > ceiling or (is_known and before > MOST * largest and factor < before)
        if not (is_short or is_long):
            return None
        self.factor = factor
        self._reruns.clear()
        return (
            f"max_recv_rows=auto: room for {factor / 1000:g} times a balanced load, after "
            f"{before / 1000:g}: the largest load of the last {len(self._loads)} steps was "
            f"{largest / 1000:g}, and {reruns} of them were run again"
            + ("; max_recv_gib allows no more" if factor == ceiling else "")
            + ("; the CUDA graph is captured again" if holds_graph else "")
        )


def holds_iteration_graph() -> bool:
    """Whether Megatron holds a CUDA graph of a step or of an evaluation."""
    wrapper = _wrapper()
    return wrapper is not None and any(wrapper.cuda_graph.values())


def drop_iteration_graphs(warmup_steps: int) -> None:
    """Let Megatron capture them again, after one more step without."""
    wrapper = _wrapper()
    for stage, graph in wrapper.cuda_graph.items():
        if graph is not None:
            wrapper.cuda_graph[stage] = wrapper.result[stage] = None
            wrapper.curr_iteration[stage] = max(0, warmup_steps - 1)
    del graph
    # The next graph has a new memory pool, unless another graph still uses the shared one: PyTorch
    # takes no new graph into a pool that none uses any more but that still holds tensors.
    module = sys.modules["megatron.core.full_cuda_graph"]
    optimizer = sys.modules.get("megatron.core.optimizer.optimizer_cuda_graph")
    if optimizer is None or optimizer.OptimizerCudaGraphWrapper.cuda_graph is None:
        module._shared_graph_pool = None  # type: ignore[attr-defined]
    gc.collect()
    torch.cuda.empty_cache()  # a new graph cannot use an old one's memory otherwise


def _wrapper() -> Any:
    module = sys.modules.get("megatron.core.full_cuda_graph")
    return getattr(module, "FullCudaGraphWrapper", None)
