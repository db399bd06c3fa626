"""`ncclep bench`, or `python -m benchmarks`, with engines that go wrong, for test_bench.py.

The processes that it starts import this file too, and so have the same engines.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch

from megatron_ncclep import cli
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.engines.reference.engine import CAPS, ReferenceEngine

# Experts of the shape with which an engine does what; with others it works.
WRONG, RAISES, HANGS = 8, 10, 14


class Wrong(ReferenceEngine):
    """Changes one element of one row on rank 1."""

    def dispatch(self, plan: Any, x: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        rows, row_w = super().dispatch(plan, x, w)
        if self.group.rank == 1 and self.num_experts == WRONG:
            rows[5, 3] += 1
        return rows, row_w


class WrongLater(ReferenceEngine):
    """Is right the first time, and takes rows of the last call later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls = 0

    def combine(self, plan: Any, y: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        out, topk_w = super().combine(plan, y, w)
        self._calls += 1
        if self.group.rank == 0 and self._calls > 4:  # two rounds before timing
            out[0] = out[1]
        return out, topk_w


class Failing(ReferenceEngine):
    """Raises or hangs on one rank, while the other one waits for it."""

    has_raised = False

    def dispatch(self, plan: Any, x: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        while self.group.rank == 1 and self.num_experts == HANGS:
            time.sleep(1)  # as a kernel that spins does
        return super().dispatch(plan, x, w)

    def combine(self, plan: Any, y: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        # A process that has raised once raises with every later shape.
        if self.group.rank == 1 and (self.num_experts == RAISES or Failing.has_raised):
            Failing.has_raised = True
            raise ZeroDivisionError("a bug")
        return super().combine(plan, y, w)


def register() -> None:
    """Add the engines to those that `ncclep bench` knows."""
    for engine in (Wrong, WrongLater, Failing):
        entry = dataclasses.replace(ENGINES["reference"], caps=CAPS, build=engine)
        ENGINES[engine.__name__.lower()] = entry


if __name__ in ("__main__", "__mp_main__"):  # not where a test reads the numbers above
    register()
if __name__ == "__main__":
    if sys.argv[1] == "bench":
        sys.exit(cli.main(sys.argv[1:]))
    from benchmarks.__main__ import main  # its names are made of the engines that there are

    sys.exit(main(sys.argv[1:]))
