"""Bugs that a dispatcher could have, for the tests of the checks: each changes what experts get."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from patience import patient

from megatron_ncclep.benchmark.subjects import Setting
from megatron_ncclep.ranks.pool import RankContext


def swapped_rows(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    order = torch.arange(len(rows))
    order[[0, -1]] = order[[-1, 0]]  # of the first and the last expert
    return rows[order], counts, probs


def reversed_probabilities(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    return rows, counts, probs.flip(0)


def wrong_counts(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    counts = torch.as_tensor(counts).clone()  # padded ones may all be the same
    largest = int(counts.argmax())
    moved = int(counts[largest]) // 2 + 1
    counts[largest] -= moved
    counts[(largest + 1) % len(counts)] += moved
    return rows, counts, probs


def half_a_gradient(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    return rows, counts, probs * 0.5 + probs.detach() * 0.5


def no_gradient_of_a_row(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    return torch.cat([rows[:1].detach(), rows[1:]]), counts, probs


BUGS = {
    "none": None,
    "swapped rows": swapped_rows,
    "reversed probabilities": reversed_probabilities,
    "wrong counts": wrong_counts,
    "half the gradient of probabilities": half_a_gradient,
    "a row without gradient": no_gradient_of_a_row,
}


def put_into(dispatcher: Any, bug: str) -> None:
    """Let what the dispatcher gives to the experts pass through one of `BUGS`."""
    change = BUGS[bug]
    if change is not None:
        original = dispatcher.dispatch_postprocess
        dispatcher.dispatch_postprocess = lambda *args: change(*original(*args))


def setting_of(context: RankContext) -> Setting:
    """Where subjects run in these tests."""
    return Setting(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device="cpu",
        timeout_s=patient(60),
        new_group=lambda: dist.new_group(timeout=timedelta(seconds=patient(60))),  # type: ignore[arg-type,return-value]
    )
