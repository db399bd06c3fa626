"""`ncclep bench`: what engines cost on this machine, checked before timing.

Reading order: command.py (arguments and ranks); job.py and shapes.py with cases.py and contents.py
(the task); shape_run.py (one shape on one rank); ranks.py (steps of all ranks: agree, time, copy
over their links); the subjects in engines.py and low_latency.py, checked by table_oracle.py;
result.py and table.py (the output).  A subject is defined here; benchmarks/ in a checkout adds
other libraries, Megatron-Core's dispatchers, layers and trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ncclep.errors import EpError

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_ncclep.benchmark.ranks import Clock, Timer
    from megatron_ncclep.benchmark.shapes import Workload

HIGH_THROUGHPUT, LOW_LATENCY = "ht", "ll"  # modes: the steps of training, or low-latency mode
# Names of a subject's passes, in the order in which they run. bwd_dispatch is the backward of
# combine (a dispatch of gradients), bwd_combine the backward of dispatch.
STEPS = ("plan", "dispatch", "combine", "bwd_dispatch", "bwd_combine")
WHOLE = ("forward", "backward")
# The pass of layers and experts that are one CUDA graph.
BOTH = "forward+backward"
# Passes of low-latency mode: each half of a pair alone, and both one right after the other.
PAIR = ("dispatch", "combine", "pair")
# Kinds of subjects that compute with experts; rows on the wire say little about their time.
WITH_EXPERTS = ("layer", "experts")


class UnavailableError(EpError):
    """A subject cannot be measured here; says why."""


@contextmanager
def excused(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of `kinds` into an UnavailableError."""
    try:
        yield
    except UnavailableError:
        raise
    except kinds as error:
        short = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise UnavailableError(str(error) if isinstance(error, EpError) else short) from error


@dataclass(frozen=True)
class Setting:
    """Where subjects run: the same on every rank except for `rank`."""

    rank: int
    num_ranks: int
    device: str  # "cpu" or "cuda"
    timeout_s: float  # that a rank waits for the others
    new_group: Callable[[], dist.ProcessGroup]  # of the same ranks with that deadline; collective

    def options(self, **options: Any) -> dict[str, Any]:
        """Fields of EpConfig: `options` with this deadline."""
        return {**options, "timeout_s": self.timeout_s, "first_timeout_s": self.timeout_s}


class Subject:
    """One thing to measure, prepared for one workload.  Making it and all methods are collective.

    Making it raises UnavailableError, on every rank that knows why, if it cannot be measured.

    Attributes:
        passes: pass -> a call that runs it once; STEPS, WHOLE or two of PAIR, in order, or BOTH.
        sms: SMs that its kernels use, as text.
        shared_bytes: torch memory that it uses and that an earlier subject allocated.
        window_bytes: memory that the other ranks write to, if known.
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
        """Make a function that times a round of its passes on this rank."""
        return timer.clock(self.passes, self._host_counts)

    def problem(self) -> str | None:
        """Run every pass and say what is wrong with the results on this rank, if anything is."""
        raise NotImplementedError

    def close(self) -> None:
        """Release its resources."""
        raise NotImplementedError
