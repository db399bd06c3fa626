"""Timing: one sample at a time, all ranks starting together; the slowest rank's time counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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


def quantiles(samples: Sequence[float], *parts: float) -> list[float]:
    """Where `parts` of `samples`, at least one, lie below: of 0.5, the median."""
    values = torch.tensor(samples, dtype=torch.float64)
    found: list[float] = values.quantile(torch.tensor(parts, dtype=torch.float64)).tolist()
    return found


# Pass -> microseconds of each time that it ran, in one round.
Times = dict[str, list[float]]
# Times a round of one subject on this rank; collective.
Clock = Callable[[], Times]


def clock_of(timer: Timer, passes: dict[str, Callable[[], Any]], include_host: bool) -> Clock:
    """Make a clock that runs every pass once, in order."""
    return lambda: {name: [timer.sample(call, include_host)] for name, call in passes.items()}


def measure(clocks: dict[str, Clock], warmup: int, samples: int) -> Iterator[dict[str, Times]]:
    """Time every subject once a round; yield each timed round, by subject.  Collective.

    The subjects are interleaved round by round, so that a clock that changes or a neighbour that
    wakes up meets all of them.
    """
    for round_number in range(warmup + samples):
        times = {name: clock() for name, clock in clocks.items()}
        if round_number >= warmup:
            yield times


def slowest(rounds: list[list[dict[str, Times]]]) -> dict[str, Times]:
    """Take the slowest rank's time of everything that ran.

    Args:
        rounds: for each rank, what `measure` yielded.

    Returns:
        subject -> pass -> microseconds, over all rounds.
    """
    return {
        subject: {
            name: [
                max(times)
                for of_ranks in zip(*rounds, strict=True)
                for times in zip(*(found[subject][name] for found in of_ranks), strict=True)
            ]
            for name in passes
        }
        for subject, passes in (rounds[0][0] if rounds[0] else {}).items()
    }
