"""Subjects on a CPU for the tests of their checks: with bugs, and with graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_pool import RankContext
from timeouts import patient

from benchmarks import layers
from benchmarks.job import make_subject
from megatron_ncclep.benchmark import Setting
from megatron_ncclep.benchmark.shapes import Workload

FFN = 48  # size of an expert


def collectivex_folder() -> Path:
    """Where CollectiveX's bench/ and configs/ are, if they are."""
    return Path(sys.prefix) / "collectivex"


def setting_of(context: RankContext) -> Setting:
    """Where subjects run in these tests."""
    timeout_s = patient(60)
    return Setting(
        context.rank, context.num_ranks, "cpu", timeout_s,
        lambda: dist.new_group(timeout=timedelta(seconds=timeout_s)),  # type: ignore[arg-type,return-value]
    )  # fmt: skip


# --- bugs that a dispatcher could have: each changes what experts get ----------------------------


def swapped_rows(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    order = torch.arange(len(rows))
    order[[0, -1]] = order[[-1, 0]]  # of the first and the last expert
    return rows[order], counts, probs


def wrong_counts(rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
    counts = torch.as_tensor(counts).clone()  # padded ones may all be the same
    largest = int(counts.argmax())
    moved = int(counts[largest]) // 2 + 1
    counts[largest] -= moved
    counts[(largest + 1) % len(counts)] += moved
    return rows, counts, probs


BUGS: dict[str, Callable[..., Any]] = {
    "none": lambda *args: args,
    "swapped rows": swapped_rows,
    "reversed probabilities": lambda rows, counts, probs: (rows, counts, probs.flip(0)),
    "wrong counts": wrong_counts,
    "half the gradient of probabilities": lambda rows, counts, probs: (
        rows, counts, probs * 0.5 + probs.detach() * 0.5,
    ),
    "a row without gradient": lambda rows, counts, probs: (
        torch.cat([rows[:1].detach(), rows[1:]]), counts, probs,
    ),
}  # fmt: skip


def put_into(dispatcher: Any, bug: str) -> None:
    """Let what the dispatcher gives to the experts pass through one of `BUGS`."""
    original = dispatcher.dispatch_postprocess
    dispatcher.dispatch_postprocess = lambda *args: BUGS[bug](*original(*args))


# --- CUDA graphs ---------------------------------------------------------------------------------


def replayed_on_cpu(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """In place of a CUDA graph: every replay leaves its results where the first one has."""
    results = call()

    def replay() -> None:
        for name, value in call().items():
            if value is not None:
                results[name].copy_(value)

    return replay, results


def prepared_on(
    context: RankContext, name: str, workload: Workload, max_recv_rows: Any = "worst"
) -> Any:
    """Prepare a subject; a CUDA graph is played by `replayed_on_cpu`."""
    with (
        mock.patch.object(layers, "captured", replayed_on_cpu),
        mock.patch.object(layers.catalogue, "unavailable_reason", return_value=None),
    ):
        return make_subject(name, setting_of(context), workload, max_recv_rows=max_recv_rows)


def problem_of(prepared: Any) -> str | None:
    """Run a subject as if it were timed, check it, and close it."""
    try:
        for call in prepared.passes.values():
            call()
        problem: str | None = prepared.problem()
        if (shared := getattr(prepared, "_shared", None)) is not None:
            assert all(weight.grad is None for weight in shared.parameters())
        return problem
    finally:
        prepared.close()
