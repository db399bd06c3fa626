"""Timing and ceiling: what is counted, apart from how long anything takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ncclep.benchmark import ceiling
from megatron_ncclep.benchmark.timing import Clocked, Spread, Timer, measure, slowest
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.testing.launcher import RankContext, RankPool


class FakeTimer:
    """Calls what it is given and says that it took as many microseconds as calls came before."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, bool]] = []

    def sample(self, call: Callable[[], Any], include_host: bool) -> float:
        self.calls.append((call(), include_host))
        return float(len(self.calls))


def test_subjects_are_interleaved_and_warm_up_is_left_out() -> None:
    subjects = [
        Clocked("a", {"plan": lambda: "a plan", "dispatch": lambda: "a dispatch"}, False),
        Clocked("b", {"forward": lambda: "b forward"}, True),
    ]
    timer: Any = FakeTimer()
    rounds = list(measure(timer, subjects, warmup=1, samples=2))
    one = [("a plan", False), ("a dispatch", False), ("b forward", True)]
    assert timer.calls == one * 3
    assert rounds == [
        {"a": {"plan": 4.0, "dispatch": 5.0}, "b": {"forward": 6.0}},
        {"a": {"plan": 7.0, "dispatch": 8.0}, "b": {"forward": 9.0}},
    ]


def test_the_slowest_rank_counts_in_every_sample() -> None:
    rank0 = [{"a": {"plan": 1.0}}, {"a": {"plan": 5.0}}]
    rank1 = [{"a": {"plan": 3.0}}, {"a": {"plan": 2.0}}]
    assert slowest([rank0, rank1]) == {"a": {"plan": [3.0, 5.0]}}


def test_spread() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(
        3.0, pytest.approx(1.4), pytest.approx(4.6)
    )
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def sample_on_rank(context: RankContext) -> list[float]:
    timer = Timer(context.group, context.device)
    tensor = torch.zeros(8, device=context.device)
    return [timer.sample(lambda: tensor.add_(1), host) for host in (True, False)]


def test_a_sample_is_a_time(pool: RankPool) -> None:
    for times in pool.run(sample_on_rank, ranks=2):
        assert all(0 < time < 60e6 for time in times)


def consecutive_on_rank(context: RankContext) -> tuple[list[float], float]:
    timer = Timer(context.group, context.device)
    tensor = torch.zeros(1, device=context.device)
    return timer.consecutive(lambda: tensor.add_(1), 3), float(tensor)


def test_consecutive_calls_are_timed_one_by_one(pool: RankPool) -> None:
    for times, calls in pool.run(consecutive_on_rank, ranks=2):
        assert calls == 3
        assert len(times) == 3
        assert all(0 < time < 60e6 for time in times)


# --- ceiling -------------------------------------------------------------------------------------


def test_random_rows_of_the_worked_example() -> None:
    """The example of random_rows."""
    found = ceiling.random_rows(rank=1, num_ranks=3, rows_per_peer=2)
    assert sorted(zip(found.peer.tolist(), found.row.tolist(), strict=True)) == [
        (0, 2), (0, 3), (2, 2), (2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_pushed_rows_do_not_meet_and_are_what_the_comparison_expects(num_ranks: int) -> None:
    """All ranks push into windows that are plain tensors here."""
    rows_per_peer = 5
    windows = torch.full((num_ranks, num_ranks * rows_per_peer), -1, dtype=torch.int32)
    for rank in range(num_ranks):
        rows = ceiling.random_rows(rank, num_ranks, rows_per_peer)
        place = (rows.peer.long(), rows.row.long())
        assert (windows[place] == -1).all(), "two ranks push to the same row"
        windows[place] = torch.arange(len(rows.peer), dtype=torch.int32) + rank * len(rows.peer)
    for rank in range(num_ranks):
        held = windows[rank].view(num_ranks, rows_per_peer, 1)
        for source in range(num_ranks):
            if source == rank:
                assert (held[source] == -1).all()
            else:
                expected = ceiling._pushed(source, rank, num_ranks, rows_per_peer, held)
                assert torch.equal(held[source], expected)


def test_a_rate_is_what_one_rank_copies_in_the_median_of_the_slowest() -> None:
    """1000 rows of 4096 bytes in 40 us, where another rank takes 50, are 81.92 GB/s."""
    copies: Any = object.__new__(ceiling._Copies)
    copies._num_rows, copies._row_bytes = 1000, 4096
    copies.copy = lambda direction, num_sms: None

    class TwoRanks:
        def gather(self, mine: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
            return torch.stack([mine, mine + 10])

    class Warming(FakeTimer):
        def sample(self, call: Callable[[], Any], include_host: bool) -> float:
            return 1e6 if super().sample(call, include_host) <= ceiling.WARMUP else 40.0

    copies._group = TwoRanks()
    timer: Any = Warming()
    assert copies.rate("push", 16, timer, timeout_s=1.0) == pytest.approx(81.92)
    assert len(timer.calls) == ceiling.WARMUP + ceiling.SAMPLES


def obstacle_on_rank(context: RankContext) -> str | None:
    return ceiling.obstacle(EpGroup.of(context.group), 4096)


def test_no_ceiling_on_a_cpu(pool: RankPool) -> None:
    if pool.backend == "gloo":
        assert set(pool.run(obstacle_on_rank, ranks=2)) == {"no GPUs"}
