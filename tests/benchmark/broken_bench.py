"""`ncclep bench` and `python -m benchmarks`, with engines that go wrong, for test_bench.py."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from processes import forked_ranks

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


def be_rank(stdout: str, *arguments: str) -> int:
    """Be a rank of `ncclep bench` that torchrun has started; standard output goes to a file."""
    from megatron_ncclep.cli import main

    with Path(stdout).open("a") as file, contextlib.redirect_stdout(file):
        return main(["bench", *arguments])


def be_command(stdout: str, module: str, *arguments: str) -> int:
    """Be the command of `module`, with the engines above; standard output goes to a file.

    To import what they need would take the ranks that it starts seconds.
    """
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    register()
    main = importlib.import_module(module).main  # its names are made of the engines that there are
    with forked_ranks(), Path(stdout).open("a") as file, contextlib.redirect_stdout(file):
        status: int = main(list(arguments))
        return status
