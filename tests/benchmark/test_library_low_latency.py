"""The check of NVIDIA's low-latency mode: a source's rows in any order, and nothing that is wrong.

The library is played by one process that has the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_stand_in import play_library

from megatron_ncclep.benchmark.low_latency_library import LibraryLowLatencySubject
from megatron_ncclep.benchmark.subjects import UnavailableError
from megatron_ncclep.benchmark.workload import WEIGHTS, Workload, X
from megatron_ncclep.errors import LibraryError
from megatron_ncclep.testing.cases import Case

RANK = 1
TWO = Case(name="two", tokens=(9, 12), hidden=24, num_experts=6, top_k=3, dtype=torch.bfloat16)
THREE = replace(TWO, name="three", tokens=(9, 12, 7))


class Handle:
    """NVIDIA's handle as rank 1 sees it; each source's rows come in an order of the moment."""

    def __init__(self, subject: Any, work: Workload) -> None:
        self._subject, self._work = subject, work
        self._num_local = work.case.num_experts // work.case.num_ranks
        self.order: list[list[int]] = []

    def _tokens(self, source: int, rank: int) -> list[int]:
        """Those of `source` that go to `rank`."""
        owners = self._work.case.topk_idx(source) // self._num_local
        return [t for t, each in enumerate(owners.tolist()) if rank in each]

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        w: Any,
        rows: Any,
        experts: Any,
        weights: Any,
        counts: Any,
        _: int,
    ) -> None:
        self.order = []
        for source in range(self._work.case.num_ranks):
            sent, sent_w = self._work.rows(X, source), self._work.weights(WEIGHTS, source)
            picks = self._work.case.topk_idx(source)
            tokens = self._tokens(source, RANK)
            tokens = [tokens[i] for i in torch.randperm(len(tokens)).tolist()]
            self.order.append(tokens)
            counts[source] = len(tokens)
            for place, t in enumerate(tokens):
                rows[source, place] = sent[t]
                local = picks[t] - RANK * self._num_local
                here = (local >= 0) & (local < self._num_local)
                experts[source, place] = torch.where(here, local, -1).int()
                # Of an assignment of another rank the library writes no weight.
                weights[source, place][here] = sent_w[t][here]

    def combine(self, y: torch.Tensor, out: torch.Tensor, _: int) -> None:
        num_ranks = self._work.case.num_ranks
        for t in range(len(out)):
            total = torch.zeros(out.shape[1])
            for peer in reversed(range(num_ranks)):  # not the contract's order
                tokens = self._tokens(RANK, peer)
                if t not in tokens:
                    continue
                if peer == RANK:
                    row = y[RANK, self.order[RANK].index(t)]
                else:
                    every = self._subject._rows(peer).view_as(y)
                    row = every[RANK, tokens.index(t)]
                total += row.float()
            out[t] = total.to(out.dtype)


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LibraryLowLatencySubject]:
    """Makes the yardstick of a case, over a `Handle`."""

    def make(case: Case = TWO, error: str | None = None) -> LibraryLowLatencySubject:
        torch.manual_seed(0)
        work = Workload(case, RANK)

        def handle(*_: Any) -> Any:
            if error is not None:
                raise LibraryError(error)
            return SimpleNamespace()

        setting = play_library(
            monkeypatch, RANK, NcclEpGroup=lambda *_, **o: None, NcclEpLowLatencyHandle=handle
        )
        subject = LibraryLowLatencySubject("nccl_ep_library", setting, work)
        subject._handle = Handle(subject, work)
        return subject

    return make


@pytest.mark.parametrize("case", [TWO, THREE])
def test_rows_of_a_source_may_lie_in_any_order(prepare: Callable, case: Case) -> None:
    subject = prepare(case)
    assert subject.problem() is None
    assert subject.problem() is None  # another order


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("row", r"dispatch: rank 1, from rank 0: rows\["),
        ("last column", r"dispatch: rank 1, from rank 0: rows\["),
        ("expert", r"dispatch: rank 1, from rank 0: topk_idx\["),
        ("weight", r"dispatch: rank 1, from rank 0: weights\["),
        ("count", r"dispatch: rank 1, from rank 0: \d+ rows, expected"),
        ("sum", r"combine: rank 1: out\["),
    ],
)
def test_one_value_that_is_wrong(
    prepare: Callable, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    subject = prepare()
    handle = subject._handle
    dispatch, combine = handle.dispatch, handle.combine

    def wrong_dispatch(x: Any, picks: Any, w: Any, rows: Any, experts: Any, weights: Any,
                       counts: Any, stream: int) -> None:  # fmt: skip
        dispatch(x, picks, w, rows, experts, weights, counts, stream)
        if what == "row":
            rows[0, 2, 3] += 1
        if what == "last column":
            rows[0, 2, -1] += 1
        if what == "expert":
            experts[0, 2] = experts[0, 2].roll(1)
        if what == "weight":
            weights[0, 2] += 1
        if what == "count":
            counts[0] -= 1

    def wrong_combine(y: Any, out: Any, stream: int) -> None:
        combine(y, out, stream)
        if what == "sum":
            out[3, 20] *= 1.02

    monkeypatch.setattr(handle, "dispatch", wrong_dispatch)
    monkeypatch.setattr(handle, "combine", wrong_combine)
    with pytest.raises(AssertionError, match=message):
        assert subject.problem() is None, subject.problem()


def test_a_sum_of_three_that_is_wrong(prepare: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a sum is the library's own; a sum is no longer right 2 % away."""
    subject = prepare(THREE)
    combine = subject._handle.combine

    def wrong(y: Any, out: Any, stream: int) -> None:
        combine(y, out, stream)
        out[3, 20] *= 1.02

    monkeypatch.setattr(subject._handle, "combine", wrong)
    assert "combine: rank 1" in str(subject.problem())


def test_what_cannot_be_measured_is_said(prepare: Callable) -> None:
    with pytest.raises(UnavailableError, match="no NVLink"):
        prepare(error="no NVLink")
    with pytest.raises(UnavailableError, match="of bfloat16 only, not of float32"):
        prepare(replace(TWO, dtype=torch.float32))
