"""Timing and ceiling: what is counted, apart from how long anything takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankContext

from megatron_ncclep.benchmark import ranks
from megatron_ncclep.benchmark.ranks import Timer, measure, quantiles, slowest
from megatron_ncclep.ranks.group import EpGroup


class FakeTimer(Timer):
    """Calls what it is given and says that it took as many microseconds as calls came before."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, bool]] = []

    def sample(self, call: Callable[[], Any], include_host: bool) -> float:
        self.calls.append((call(), include_host))
        return float(len(self.calls))


def test_subjects_are_interleaved_and_warm_up_is_left_out() -> None:
    timer = FakeTimer()
    passes = {"plan": lambda: "a plan", "dispatch": lambda: "a dispatch"}
    clocks = {
        "a": timer.clock(passes, False),
        "b": timer.clock({"forward": lambda: "b forward"}, True),
    }
    rounds = list(measure(clocks, warmup=1, samples=2))
    one = [("a plan", False), ("a dispatch", False), ("b forward", True)]
    assert timer.calls == one * 3
    assert rounds == [
        {"a": {"plan": [4.0], "dispatch": [5.0]}, "b": {"forward": [6.0]}},
        {"a": {"plan": [7.0], "dispatch": [8.0]}, "b": {"forward": [9.0]}},
    ]


def test_the_slowest_rank_counts_in_every_sample() -> None:
    rank0 = [{"a": {"plan": [1.0, 9.0]}}, {"a": {"plan": [5.0]}}]
    rank1 = [{"a": {"plan": [3.0, 8.0]}}, {"a": {"plan": [2.0]}}]
    assert slowest([rank0, rank1]) == {"a": {"plan": [3.0, 9.0, 5.0]}}


def test_quantiles() -> None:
    assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0], 0.1, 0.5, 0.9) == pytest.approx([1.4, 3.0, 4.6])
    assert quantiles([7.0], 0.5, 0.99) == [7.0, 7.0]


def test_calls_are_timed_one_by_one_and_a_cpu_has_no_ceiling(ctx: RankContext) -> None:
    timer = Timer(ctx.group, ctx.device)
    tensor = torch.zeros(1, device=ctx.device)
    add = lambda: tensor.add_(1)  # noqa: E731
    times = [timer.sample(add, True), timer.sample(add, False), *timer.consecutive(add, 3)]
    assert float(tensor) == len(times) == 5
    assert all(time > 0 for time in times)
    assert ranks.no_ceiling_reason(EpGroup.of(ctx.group), 4096) == "no GPUs"


# --- ceiling -------------------------------------------------------------------------------------


def test_random_rows_of_the_worked_example() -> None:
    """The example of random_rows."""
    peer, row = ranks.random_rows(rank=1, num_ranks=3, rows_per_peer=2)
    assert sorted(zip(peer.tolist(), row.tolist(), strict=True)) == [
        (0, 2), (0, 3), (2, 2), (2, 3),
    ]  # fmt: skip
