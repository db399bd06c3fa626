"""Timing: one sample at a time, all ranks starting together; the slowest rank's time counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

# Device-side delay before a sample.  While it lasts the host queues the kernels of the call, so
# that the time it takes to launch them is not measured.  `_sleep` counts cycles, of about 2 GHz:
# a millisecond, because a host that has done something else in between needs several hundred us.
DELAY_CYCLES = 2_000_000


class Timer:
    """Times calls on one rank of `group`.  Every method is collective.

    Args:
        group: of the ranks that are measured together; its backend moves tensors of `device`.
        device: "cuda" times with device events, "cpu" with the host's clock.
    """

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        self._group = group
        self._on_gpu = device == "cuda"
        self._tiny = torch.zeros(1, device=device)

    def sample(self, call: Callable[[], Any], include_host: bool) -> float:
        """Call `call` once and return the microseconds that it took on this rank.

        The ranks are aligned by an all-reduce of one number on the device before it.

        Args:
            call: what to time.
            include_host: the device is idle when the call starts, so that the time to launch its
                work counts.  Otherwise the device is kept busy meanwhile (GPU only).
        """
        if not self._on_gpu:
            dist.all_reduce(self._tiny, group=self._group)
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (before, after):
            event.record()  # torch makes an event when it is first recorded
        if not include_host:
            # Before the all-reduce, because the clocks of two GPUs differ: a delay after it pulls
            # the ranks apart again, by tens of microseconds in a millisecond.
            torch.cuda._sleep(DELAY_CYCLES)
        dist.all_reduce(self._tiny, group=self._group)
        if include_host:
            torch.cuda.synchronize()
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def consecutive(self, call: Callable[[], Any], count: int) -> list[float]:
        """Call `call` `count` times, one right after the other; microseconds of each on this rank.

        The ranks start together.  On a GPU a call ends when its last kernel does, and the host goes
        on to the next one without waiting, as in training.
        """
        dist.all_reduce(self._tiny, group=self._group)
        if not self._on_gpu:
            times = [time.perf_counter()]
            for _ in range(count):
                call()
                times.append(time.perf_counter())
            return [(after - before) * 1e6 for before, after in pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in pairwise(events)]


@dataclass(frozen=True)
class Spread:
    """Median and spread of the samples of one pass, in microseconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise `samples`, at least one."""
        values = torch.tensor(samples, dtype=torch.float64)
        p10, median, p90 = values.quantile(
            torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        ).tolist()
        return cls(median, p10, p90)


@dataclass(frozen=True)
class Clocked:
    """Something to time: a name, its passes in the order in which they run, and how to time it."""

    name: str
    passes: dict[str, Callable[[], Any]]
    include_host: bool


def measure(
    timer: Timer, subjects: Sequence[Clocked], warmup: int, samples: int
) -> Iterator[dict[str, dict[str, float]]]:
    """Time every pass of every subject once a round; yield each timed round.  Collective.

    The subjects are interleaved round by round, so that a clock that changes or a neighbour that
    wakes up meets all of them.

    Yields:
        subject -> pass -> microseconds on this rank.
    """
    for round_number in range(warmup + samples):
        times = {
            subject.name: {
                name: timer.sample(call, subject.include_host)
                for name, call in subject.passes.items()
            }
            for subject in subjects
        }
        if round_number >= warmup:
            yield times


def slowest(rounds: list[list[dict[str, dict[str, float]]]]) -> dict[str, dict[str, list[float]]]:
    """Take the slowest rank's time of every sample.

    Args:
        rounds: for each rank, what `measure` yielded.

    Returns:
        subject -> pass -> microseconds, one for each round.
    """
    mine = rounds[0]
    return {
        subject: {
            name: [
                max(rank[number][subject][name] for rank in rounds) for number in range(len(mine))
            ]
            for name in mine[0][subject]
        }
        for subject in (mine[0] if mine else {})
    }
