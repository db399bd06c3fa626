"""What the device and the host do in a training step, with torch's profiler, apart from timing.

Kernels take as long with the profiler as without, a host's calls a little longer.  So the device's
time is compared with steps that were timed without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.benchmark.kernel_kinds import Interval, covered, kind_of, shares

# Calls in which a host waits for its device.  A copy to ordinary memory waits too; the others of
# its name take microseconds.
WAITS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cudaMemcpyAsync", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize",
)  # fmt: skip
# How this file and the profiler wait when a call is over; nothing in a step ends with it.
AFTERWARDS = "cudaDeviceSynchronize"
STEPS = 2


@dataclass(frozen=True)
class StepProfile:
    """One training step on one rank, in microseconds; the mean of `STEPS`.

    Attributes:
        kinds_us: kind of kernel -> its share of the time in which the device was busy.
        host_us: until the host has queued the step, less the time in which it waits for the device.
    """

    kinds_us: dict[str, float]
    host_us: float


def profile_steps(phases: list[tuple[Callable[[], Any], bool]]) -> StepProfile:
    """Profile `STEPS` training steps, waiting for the device after each phase.

    Args:
        phases: what a step calls, in order, and whether that is the optimizer.
    """
    kinds: dict[str, float] = {}
    host_us = 0.0
    for _ in range(STEPS):
        for call, is_optimizer in phases:
            kernels, calls, elapsed_us = _record(call, is_optimizer)
            for kind, share in shares(kernels).items():
                kinds[kind] = kinds.get(kind, 0.0) + share / STEPS
            host_us += (elapsed_us - covered(calls)) / STEPS
    return StepProfile(kinds, host_us)


def _record(
    call: Callable[[], Any], is_optimizer: bool
) -> tuple[list[Interval], list[Interval], float]:
    """Record one call: the device's kernels, the host's waits, and the host's microseconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # The device's activities and the host's calls of CUDA; no operators, which would cost more.
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        start = time.perf_counter()
        call()
        elapsed_us = (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
    events = sorted(recorded.events() or (), key=lambda event: event.time_range.start)
    kernels, waits = [], []
    for event in events:
        name, begin, end = event.name, event.time_range.start, event.time_range.end
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels.append(Interval(name, begin, end, kind_of(name, is_optimizer)))
        elif name in WAITS:
            waits.append(Interval(name, begin, end))
    while waits and waits[-1].name == AFTERWARDS:
        waits.pop()
    return kernels, waits, elapsed_us
