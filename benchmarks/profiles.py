"""What the device does in a training step, by the profiler: kinds of kernels, and traces.

`waterfall.py` draws a trace.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import KINDS

# The number of profiled steps.
PROFILED_STEPS = 2
# Calls in which a host waits for its device.  A copy to ordinary memory waits too; the others of
# its name take microseconds.
WAITS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cudaMemcpyAsync", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize",
)  # fmt: skip
# What fills the marks between the phases of a step in a trace: nothing else has complex numbers.
MARK = "FillFunctor<c10::complex<double>"
# The key of a trace that says of each phase whether it is the optimizer's.
IN_OPTIMIZER = "in_optimizer"
# Kinds of kernels by name: the first match decides.  `plan` is everything of this package's and of
# NVIDIA's library that is neither dispatch nor combine; `permute` whatever reorders rows on their
# own GPU: Megatron-Core's dispatchers without fused permute use torch's indexing.  Of our experts'
# FP8 kernels only the products are GEMMs.
_RULES = (
    ("GEMM", r"ncclep::experts::multiply"),
    ("rest", r"ncclep::experts"),
    ("dispatch", r"(ncclep|nccl_ep|hybrid_ep|deep_ep).*dispatch|dispatch_kernel"),
    ("combine", r"(ncclep|nccl_ep|hybrid_ep|deep_ep).*combine|combine_kernel"),
    ("plan", r"ncclep|nccl_ep|hybrid_ep|deep_ep"),
    ("collectives", r"^nccl|nccl(dev)?kernel"),
    ("attention", r"flash|fmha|sdpa|attention|attn|cudnn::fusion|rope|scaled_.*softmax"),
    ("permute", r"permute|row_id_map|chunk_sort|sort_chunks"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|xmma|splitk|grouped_mm|matmul"),
    ("permute", r"index(?!ed)|scatter|gather(?!topk)|sort|nonzero|deviceselect"),
    ("optimizer", r"multi_tensor|adam"),
)


@dataclass(frozen=True)
class Interval:
    """Time in which one kernel runs, or one call of the host lasts."""

    name: str  # of the kernel or call
    start: float  # microseconds
    end: float
    kind: str = "rest"  # of a kernel: one of `KINDS`, or a cause of waiting


def kernel_kind(kernel: str, in_optimizer: bool = False) -> str:
    """The kind of a kernel by name; all but collectives of the optimizer's are its own."""
    matches = (kind for kind, rule in _RULES if re.search(rule, kernel, re.IGNORECASE))
    kind = next(matches, "rest")
    return "optimizer" if in_optimizer and kind != "collectives" else kind


def time_shares(intervals: Iterable[Interval]) -> dict[str, float]:
    """Divide the time in which anything runs among the kinds; microseconds.

    Where n intervals overlap, each gets one n-th of the time, so that the sum is the time in which
    the device was busy.  Example: GEMM from 0 to 10 and dispatch from 8 to 12 make 9 and 3.
    """
    ends = [end for i in intervals for end in ((i.start, 1, i.kind), (i.end, -1, i.kind))]
    kinds = dict.fromkeys((*KINDS, *(kind for *_, kind in ends)))
    found, running = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0)
    before = 0.0
    for now, change, kind in sorted(ends, key=lambda end: end[0]):
        total = sum(running.values())
        for name, count in running.items():
            if count:
                found[name] += (now - before) * count / total
        running[kind] += change
        before = now
    return found


def profile_steps(phases: list[tuple[Callable[[], Any], bool]]) -> tuple[dict[str, float], float]:
    """Profile training steps on one rank, waiting for the device after each phase of a step.

    Kernels take as long with the profiler as without, a host's calls a little longer.  So the
    device's time is compared with steps that were timed without it.

    Returns:
        the mean of `PROFILED_STEPS` steps in microseconds: kind of kernel -> its share of the time
        in which the device was busy; and how long the host queues a step without waiting.
    """
    kinds, host_us = dict.fromkeys(KINDS, 0.0), 0.0
    for _ in range(PROFILED_STEPS):
        for call, is_optimizer in phases:
            kernels, waits, elapsed_us = _record(call, is_optimizer)
            for kind, share in time_shares(kernels).items():
                kinds[kind] += share / PROFILED_STEPS
            host_us += (elapsed_us - sum(time_shares(waits).values())) / PROFILED_STEPS
    return kinds, host_us


def trace_path(out: Path, what: str, rank: int) -> Path:
    """Where the trace of a step of `what` on `rank` goes: a file for each rank in one folder."""
    return out / "traces" / re.sub(r"[^\w.-]+", "-", what) / f"rank{rank}.json"


def trace_step(phases: list[tuple[Callable[[], Any], bool]], path: Path) -> None:
    """Write torch's trace of one step to `path`, without waits between the phases."""
    from torch.profiler import ProfilerActivity, profile

    mark = torch.zeros(1, dtype=torch.complex128, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        mark.fill_(1)
        for call, _ in phases:
            call()
            mark.fill_(1)
        torch.cuda.synchronize()
        recorded.add_metadata_json(IN_OPTIMIZER, json.dumps([flag for _, flag in phases]))
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))


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
    kernels, waits = [], []
    for event in sorted(recorded.events() or (), key=lambda event: event.time_range.start):
        name, (begin, end) = event.name, (event.time_range.start, event.time_range.end)
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels.append(Interval(name, begin, end, kernel_kind(name, is_optimizer)))
        elif name in WAITS:
            waits.append(Interval(name, begin, end))
    # The final wait of this function and the profiler; no step ends with one.
    while waits and waits[-1].name == "cudaDeviceSynchronize":
        waits.pop()
    return kernels, waits, elapsed_us
