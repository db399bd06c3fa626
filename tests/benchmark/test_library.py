"""The checks of NVIDIA's library: rows may lie in any order, and nothing else may differ.

The library is played by one process that has all rows and computes the sums as it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.benchmark import Setting, UnavailableError, engines, shapes
from megatron_ncclep.benchmark.engines import LibrarySubject
from megatron_ncclep.benchmark.shapes import WEIGHTS, Workload, X
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries.nccl_ep import CHOICE, FIXED_ORDER, PULL_PUSH
from megatron_ncclep.testing.cases import Case
from megatron_ncclep.testing.table_oracle import table_dispatch

RANK = 1
CASE = Case("yardstick", (20, 30, 25), hidden=24, num_experts=6, top_k=3, alignment=16)


class Handle:
    """NVIDIA's handle as rank 1 sees it, which puts rows where `place` says and adds as it does."""

    def __init__(self, work: Workload, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._work, self._place = work, place
        self.adds_by_pick = False
        self.picks: torch.Tensor | None = None

    def update(self, topk_idx: torch.Tensor, *_: Any) -> None:
        self.picks = topk_idx
        self.place = self._place(torch.repeat_interleave(self._work.tables[RANK].padded))

    def dispatch(self, x: Any, w: Any, rows: Any, row_w: Any, stream: int) -> None:
        work, table = self._work, self._work.tables[RANK]
        every = work.every(WEIGHTS)
        if w is not None:
            # Weights are in the order in which this rank named its experts.
            assert self.picks is not None
            order = work.topk_idx[:, :, None] == self.picks[:, None]
            every[RANK] = torch.where(order, w[:, None], 0).sum(dim=2)
        kind = X if x is work.x else shapes.GRAD_OUT
        sent, weights = table_dispatch(table, work.every(kind), every)
        rows[self.place] = sent
        if row_w is not None:
            row_w[self.place] = weights

    def combine(self, y: Any, w: Any, out: Any, topk_w: Any, stream: int) -> None:
        """Sums of this rank's tokens; what other ranks have is as it must be."""
        work = self._work
        rows = work.every(shapes.Y if topk_w is None else shapes.GRAD_ROWS)
        rows[RANK] = y[self.place]
        mine = work.tokens_of(RANK)
        assert self.picks is not None
        slots = torch.cat([table.slot[mine] for table in work.tables], dim=1)  # of all experts
        for t, slot_of in enumerate(slots.tolist()):
            named = [e for e in self.picks[t].tolist() if e >= 0]
            ranks = list(dict.fromkeys(e // 2 for e in named))
            total = torch.zeros(CASE.hidden)
            for owner in ranks if self.adds_by_pick else sorted(ranks):
                part = torch.zeros(CASE.hidden)
                for e in sorted(e for e in named if e // 2 == owner):
                    part += rows[owner][slot_of[e]].float()
                total += part.to(y.dtype).float()
            out[t] = total.to(out.dtype)
            if topk_w is None:
                continue
            row_w = work.every(shapes.GRAD_WEIGHTS)
            row_w[RANK] = w[self.place]
            for k, e in enumerate(self.picks[t].tolist()):
                topk_w[t, k] = row_w[e // 2][slot_of[e]] if e >= 0 else 0


def in_any_order(block: torch.Tensor) -> torch.Tensor:
    """Where each row goes: anywhere in the block of its expert."""
    shuffled = torch.randperm(len(block))
    place = torch.empty_like(shuffled)
    place[torch.arange(len(block))] = shuffled[block[shuffled].argsort(stable=True)]
    return place


def in_another_block(block: torch.Tensor) -> torch.Tensor:
    place = torch.arange(len(block))
    place[[0, -1]] = place[[-1, 0]]
    return place


def play_library(monkeypatch: pytest.MonkeyPatch, rank: int, **classes: Any) -> Any:
    """Have the benchmark find `classes` in the extension; returns a `Setting` of `rank`."""
    native = SimpleNamespace(**classes)
    monkeypatch.setattr(engines.extension, "load", lambda: native)
    monkeypatch.setattr(engines.extension, "current_stream", lambda: 0)
    monkeypatch.setattr(engines, "communicator_of", lambda *_: None)
    monkeypatch.setattr(engines, "open_library", lambda: SimpleNamespace(native=None))
    monkeypatch.setattr(engines, "choose_engine", lambda *_: None)
    monkeypatch.setattr(engines.EpGroup, "of", lambda group: group)
    group: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    return Setting(rank, 2, "cpu", 60.0, lambda: group)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LibrarySubject, Handle]]:
    """Makes the yardstick over a `Handle`."""

    def prepare(
        place: Callable[[torch.Tensor], torch.Tensor],
        adds_by_pick: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[LibrarySubject, Handle]:
        work = Workload(replace(CASE, dtype=dtype), RANK)
        handle = Handle(work, place)
        setting = play_library(
            monkeypatch, RANK, NcclEpHandle=lambda *_: handle,
            NcclEpGroup=lambda *_, **options: SimpleNamespace(handle_bytes=lambda *_: 1),
        )  # fmt: skip
        mode = "+pull_push" if adds_by_pick else ""
        name = f"nccl_ep_library:transformer-engine{mode}"
        return LibrarySubject(name, setting, work), handle

    return prepare


def test_rows_of_an_expert_may_lie_in_any_order(prepared: Callable) -> None:
    torch.manual_seed(0)
    subject, _ = prepared(in_any_order)
    assert subject.problem() is None
    assert subject.problem() is None  # another order
    text = prepared(in_another_block)[0].problem()
    assert str(text).startswith("dispatch: rank 1, rows[")


def test_the_last_pass_is_checked(prepared: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each pass can have wrong is in test_bench_shapes.py, of the same check."""
    subject, handle = prepared(in_any_order)
    combine = handle.combine

    def wrong(y: Any, w: Any, out: Any, topk_w: Any, stream: int) -> None:
        combine(y, w, out, topk_w, stream)
        if w is not None:
            topk_w[3, 1] += 1

    monkeypatch.setattr(handle, "combine", wrong)
    assert str(subject.problem()).startswith("bwd_combine: rank 1, weights")


def test_sums_in_the_order_of_picks(prepared: Callable) -> None:
    """A library that adds so gets its assignments sorted, and no other result is right.

    In fp32: three rows of bf16 add up to the same in any order.
    """
    subject, handle = prepared(in_any_order, adds_by_pick=True, dtype=torch.float32)
    handle.adds_by_pick = True
    assert subject.problem() is None
    subject, handle = prepared(in_any_order, adds_by_pick=False, dtype=torch.float32)
    handle.adds_by_pick = True
    assert str(subject.problem()).startswith("combine: rank 1, rows[")


@pytest.mark.parametrize(
    ("name", "package", "modes"),
    [
        ("nccl_ep_library", None, "00"),
        ("nccl_ep_library:nccl-extensions@24", "nccl-extensions", "00"),
        ("nccl_ep_library:transformer-engine", "transformer-engine", "00"),
        ("nccl_ep_library:transformer-engine+pull_push@64", "transformer-engine", "10"),
        ("nccl_ep_library:transformer-engine+pull_push+fixed_order", "transformer-engine", "11"),
    ],
)
def test_a_name_decides_what_the_library_finds(
    name: str, package: str | None, modes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says; the engine, asked whether it can run, has its fixed order."""
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setenv(PULL_PUSH, "1")
    monkeypatch.setenv(FIXED_ORDER, "0")
    before = dict(os.environ)
    seen: list[tuple[Any, ...]] = []

    def look(*arguments: Any, **options: Any) -> None:
        seen.append(tuple(os.environ.get(v) for v in (CHOICE, PULL_PUSH, FIXED_ORDER)))

    setting, work = play_library(monkeypatch, RANK, NcclEpGroup=look), Workload(CASE, RANK)
    monkeypatch.setattr(engines, "choose_engine", look)
    monkeypatch.setattr(LibrarySubject, "_allocate", lambda *_: None)
    LibrarySubject(name, setting, work)
    assert seen == [(package, modes[0], "1"), (package, *modes)]
    assert dict(os.environ) == before


def test_a_package_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise InputError("NCCLEP_NCCL_EP_LIBRARY=nccl-extensions: this package brings none")

    setting, work = play_library(monkeypatch, RANK), Workload(CASE, RANK)
    monkeypatch.setattr(engines, "choose_engine", fail)
    with pytest.raises(UnavailableError, match="this package brings none"):
        LibrarySubject("nccl_ep_library:nccl-extensions", setting, work)
