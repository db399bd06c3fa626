"""What a kernel works at, told by its name, and how the device's time divides among the kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

OPTIMIZER, COLLECTIVES, REST = "optimizer", "collectives", "rest"
# In the order of the table.
KINDS = (
    "attention", "GEMM", "dispatch", "combine", "plan", "permute", OPTIMIZER, COLLECTIVES, REST,
)  # fmt: skip

# The first that is found in a kernel's name decides.  `plan` is all of this package's and of
# NVIDIA's library that is neither dispatch nor combine.  `permute` is whatever puts rows in another
# order on their own GPU: Megatron-Core's dispatchers without fused permute use torch's indexing.
_RULES = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("dispatch", r"(ncclep|nccl_ep|hybrid_ep|deep_ep).*dispatch|dispatch_kernel"),
        ("combine", r"(ncclep|nccl_ep|hybrid_ep|deep_ep).*combine|combine_kernel"),
        ("plan", r"ncclep|nccl_ep|hybrid_ep|deep_ep"),
        (COLLECTIVES, r"^nccl|nccl(dev)?kernel"),
        ("attention", r"flash|fmha|sdpa|attention|attn|cudnn::fusion|rope|scaled_.*softmax"),
        ("permute", r"permute|row_id_map|chunk_sort|sort_chunks"),
        ("GEMM", r"gemm|gemv|nvjet|cutlass|xmma|splitk|grouped_mm|matmul"),
        ("permute", r"index(?!ed)|scatter|gather(?!topk)|sort|nonzero|deviceselect"),
        (OPTIMIZER, r"multi_tensor|adam"),
    )
)


@dataclass(frozen=True)
class Interval:
    """Time in which one kernel runs, or one call of the host lasts.

    Attributes:
        name: of the kernel or call.
        start, end: microseconds.
        kind: one of `KINDS`; of a kernel only.
    """

    name: str
    start: float
    end: float
    kind: str = REST


def kind_of(kernel: str, in_optimizer: bool = False) -> str:
    """The kind of a kernel.

    Args:
        kernel: its name.
        in_optimizer: the optimizer queued it.  Then all but collectives is the optimizer's.
    """
    kind = next((kind for kind, pattern in _RULES if pattern.search(kernel)), REST)
    return OPTIMIZER if in_optimizer and kind != COLLECTIVES else kind


def shares(intervals: Iterable[Interval]) -> dict[str, float]:
    """Divide the time in which anything runs among the kinds; microseconds.

    Where n intervals overlap, each gets one n-th of the time, so that the sum is the time in which
    the device was busy.

    Example: GEMM from 0 to 10 and dispatch from 8 to 12 make 9 and 3.
    """
    ends = [
        change
        for interval in intervals
        for change in ((interval.start, 1, interval.kind), (interval.end, -1, interval.kind))
    ]
    found = dict.fromkeys(KINDS, 0.0)
    running = dict.fromkeys(KINDS, 0)
    before = 0.0
    for now, change, kind in sorted(ends, key=lambda end: end[0]):
        total = sum(running.values())
        for name, count in running.items():
            if count:
                found[name] += (now - before) * count / total
        running[kind] += change
        before = now
    return found


def covered(intervals: Iterable[Interval]) -> float:
    """Microseconds in which at least one of the intervals lasts."""
    return sum(shares(intervals).values())
