"""What a subject of the benchmark is, what it is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_ncclep.benchmark.timing import Clock, Timer, clock_of
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.errors import EpError
from megatron_ncclep.testing.cases import refusal

# What a subject's passes are called, in the order in which they run.  bwd_dispatch is the backward
# of combine (a dispatch of gradients), bwd_combine the backward of dispatch.
STEPS = ("plan", "dispatch", "combine", "bwd_dispatch", "bwd_combine")
WHOLE = ("forward", "backward")
# Of layers and experts that are one CUDA graph.
BOTH = "forward+backward"
# Of low-latency mode: each half of a pair alone, and both right after each other.
PAIR = ("dispatch", "combine", "pair")
# Kinds of subjects that compute with experts; rows on the wire say little about their time.
WITH_EXPERTS = ("layer", "experts")
# Kinds of subjects that have the passes `WHOLE`, and whose host time counts.
LAUNCHED = ("megatron", *WITH_EXPERTS)


class UnavailableError(EpError):
    """A subject cannot be measured here; says why."""


@contextmanager
def excused(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of `kinds` into an UnavailableError."""
    try:
        yield
    except kinds as error:
        if isinstance(error, UnavailableError):
            raise
        short = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise UnavailableError(str(error) if isinstance(error, EpError) else short) from error


@dataclass(frozen=True)
class Setting:
    """Where subjects run: the same on every rank but for `rank`.

    Attributes:
        rank, num_ranks: of this process in the group that is measured.
        device: "cpu" or "cuda".
        timeout_s: seconds that a rank waits for the others.
        new_group: makes a process group of the same ranks with that deadline.  Collective.
    """

    rank: int
    num_ranks: int
    device: str
    timeout_s: float
    new_group: Callable[[], dist.ProcessGroup]


class Subject:
    """One thing to measure, made ready with one workload.  Making it is collective, as all methods.

    Making it raises UnavailableError, on every rank that knows, where it cannot be measured.

    Args:
        name: as on the command line.
        setting, workload: where and what.

    Attributes:
        passes: pass -> a call that runs it once; STEPS, WHOLE or two of PAIR, in order, or BOTH.
        sms: SMs that its kernels use, in words.
        shared_bytes: memory of torch's that it uses and a subject before it had made.
        window_bytes: memory that the other ranks write to, if it is known.
    """

    passes: dict[str, Callable[[], Any]]
    sms = "-"
    shared_bytes = 0
    window_bytes: int | None = None
    _host_counts = False  # the time to launch kernels is part of what is measured

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        self.name = name
        self._rank, self._workload = setting.rank, workload

    def clock(self, timer: Timer) -> Clock:
        """Make what times a round of its passes on this rank."""
        return clock_of(timer, self.passes, self._host_counts)

    def problem(self) -> str | None:
        """Run every pass and say what is wrong with the results on this rank, if anything is."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what it holds."""
        raise NotImplementedError


def check_limits(workload: Workload, caps: EngineCaps) -> None:
    """Refuse a workload beyond the limits of an engine.

    Raises:
        UnavailableError: names the limit.
    """
    if limit := refusal(workload.case, caps):
        raise UnavailableError(
            f"the shape is beyond what {caps.name} takes: {limit} {getattr(caps, limit)}"
        )
