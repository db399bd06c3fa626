"""DeepEP V2 and HybridEP in the benchmark: which package is there, and the check of their results.

The packages need GPUs; `Played` has the calls that the subjects make and computes with the oracle.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.benchmark import Setting, UnavailableError, deepep
from megatron_ncclep.benchmark.command import make_subject
from megatron_ncclep.benchmark.job import DEEPEP
from megatron_ncclep.benchmark.layer_model import BUFFERS, close_dispatcher
from megatron_ncclep.benchmark.shapes import (
    GRAD_OUT,
    GRAD_ROWS,
    GRAD_WEIGHTS,
    WEIGHTS,
    Workload,
    X,
    Y,
)
from megatron_ncclep.testing.cases import Case
from megatron_ncclep.testing.table_oracle import table_combine, table_dispatch

RANK = 1
CASE = Case(
    "others", (20, 30, 25), hidden=256, num_experts=6, top_k=3, alignment=16, dtype=torch.bfloat16
)


class Played:
    """Either buffer, on rank `RANK`: an expert's rows are in an order of its own, by handle.

    `fault` changes (rows, weights) that a combine receives.
    """

    num_bytes = 0

    def __init__(self, work: Workload, fault: Any = lambda rows, w: (rows, w)) -> None:
        self._work, self._fault, self.sms = work, fault, set[Any]()

    def _moved(self, rows: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        work, kind = self._work, X if rows is self._work.x else GRAD_OUT
        sent = work.every(kind)
        assert torch.equal(rows, sent[RANK])
        moved, w = table_dispatch(work.tables[RANK], sent, work.every(WEIGHTS))
        padding = work.tables[RANK].token_of_row < 0
        assert w is not None
        return moved[order], w.masked_fill(padding, float("nan"))[order]  # anything may be there

    def _order(self) -> torch.Tensor:
        table = self._work.tables[RANK]
        mixed = torch.randperm(table.num_rows)
        key = torch.repeat_interleave(table.padded) * 2 + (table.token_of_row < 0)
        return mixed[key[mixed].argsort(stable=True)]

    def _added(self, order: torch.Tensor, *mine: Any) -> tuple[torch.Tensor, Any]:
        rows, w = self._fault(*mine)
        work, kinds = self._work, (Y, None) if w is None else (GRAD_ROWS, GRAD_WEIGHTS)
        every = work.every(kinds[0])
        every[RANK] = torch.empty_like(rows).index_copy_(0, order, rows)
        every_w = None if w is None or kinds[1] is None else work.every(kinds[1])
        if every_w is not None:
            every_w[RANK] = torch.empty_like(w).index_copy_(0, order, w)
        tokens = list(work.case.tokens)
        return table_combine(work.tables, tokens, RANK, work.case.top_k, every, every_w)

    # DeepEP's.

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        assert (num_experts, num_topk) == (CASE.num_experts, CASE.top_k)
        return 20

    def dispatch(
        self, x: torch.Tensor, topk_idx: Any = None, topk_weights: Any = None, handle: Any = None,
        num_experts: Any = None, expert_alignment: Any = None, *, num_sms: int, do_expand: bool,
        do_zero_padding: bool,
    ) -> Any:  # fmt: skip
        assert do_expand
        assert do_zero_padding
        assert (handle is None) != (topk_idx is None)
        self.sms.add(num_sms)
        order = self._order() if handle is None else handle
        rows, w = self._moved(x, order)
        return rows, None, None if topk_weights is None else w, order, None

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: Any, num_sms: int) -> Any:
        self.sms.add(num_sms)
        return *self._added(handle, x, topk_weights), None

    # HybridEP's.

    def dispatch_with_permute(
        self, *, hidden: torch.Tensor, pad_multiple: int, fuse_permute_dispatch: bool,
        routing_map: Any = None, probs: Any = None, handle: Any = None,
        num_of_experts_per_rank: Any = None, num_permuted_tokens: Any = None,
    ) -> Any:  # fmt: skip
        assert pad_multiple == CASE.alignment
        assert (handle is None) != (routing_map is None)
        order = self._order() if handle is None else handle
        rows, w = self._moved(hidden, order)
        return rows, None if probs is None else w, None, None, order

    def combine_with_unpermute(
        self, *, hidden: torch.Tensor, probs: Any, handle: Any, pad_multiple: int,
        fuse_unpermute_combine: bool,
    ) -> Any:  # fmt: skip
        out, w = self._added(handle, hidden, probs)
        if w is None:
            return out, None
        wide = torch.zeros(len(out), CASE.num_experts)
        return out, wide.scatter_(1, self._work.topk_idx, w)


def installed(monkeypatch: pytest.MonkeyPatch, **classes: Any) -> None:
    """Let `deep_ep` be a package with `classes`."""
    package = ModuleType("deep_ep")
    package.__spec__ = ModuleSpec("deep_ep", None)
    vars(package).update(classes)
    monkeypatch.setitem(sys.modules, "deep_ep", package)


def subject_of(monkeypatch: pytest.MonkeyPatch, name: str, work: Workload, **more: Any) -> Any:
    """The subject, and the buffer that it made."""
    played = Played(work, **more)
    made = lambda *args, **options: played  # noqa: E731
    installed(monkeypatch, **{deepep.CLASSES[name.partition(":")[0].partition("@")[0]][0]: made})
    monkeypatch.setattr(deepep.dist, "all_reduce", lambda *args, **options: None)
    group: Any = SimpleNamespace()
    return make_subject(name, Setting(RANK, 3, "cpu", 60.0, lambda: group), work), played


FAULTS: dict[str, Any] = {
    "rows in another order": lambda rows, w: (rows.flip(0), w),
    "rows without a tenth": lambda rows, w: (rows * 0.9, w),
    "weights in another order": lambda rows, w: (rows, None if w is None else w.flip(0)),
}


@pytest.mark.parametrize("name", [*DEEPEP, "deepep@24"])
def test_rows_may_lie_in_any_order_within_an_expert(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same one in both directions of a handle; and a combine may round as it likes."""
    work = Workload(CASE, RANK)
    subject, played = subject_of(
        monkeypatch, name, work, fault=lambda rows, w: (rows * (1 + 1 / 256), w)
    )
    for call in subject.passes.values():
        call()
    assert subject.problem() is None
    if name.startswith("deepep"):
        assert played.sms == {24 if "@" in name else 20}
        assert subject.sms == f"{24 if '@' in name else 20}, all"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_wrong_results_are_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, _ = subject_of(monkeypatch, name, Workload(CASE, RANK), fault=FAULTS[fault])
    assert "rank 1" in str(subject.problem())


def test_a_dispatch_must_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, played = subject_of(monkeypatch, "deepep", Workload(CASE, RANK))
    moved = played._moved
    played._moved = lambda rows, order: (
        moved(rows, order)[0] * (1 + 1 / 128),
        moved(rows, order)[1],
    )
    assert "dispatch: rank 1" in str(subject.problem())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of the other branch has the same name; a broken one is imported only now."""
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"not installed: build branch main \(V2\)"):
        deepep.buffer_class("deepep")
    installed(monkeypatch, HybridEPBuffer=Played)
    assert deepep.buffer_class("hybridep") is Played
    with pytest.raises(UnavailableError, match="the installed deep_ep has no ElasticBuffer"):
        deepep.buffer_class("deepep")
    monkeypatch.delitem(sys.modules, "deep_ep")
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnccl.so.2: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match="OSError: libnccl"):
        deepep.buffer_class("deepep")


def test_rows_that_they_cannot_add_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepEP's combine would fail to compile, after a dispatch that works."""
    for change, message in (
        ({"dtype": torch.float32}, r"bf16 rows only, and these are torch\.float32"),
        ({"hidden": 2880}, "a multiple of 256 values, and these have 2880"),
    ):
        work = Workload(replace(CASE, **change), RANK)  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match=message):
            subject_of(monkeypatch, "deepep", work)


def test_closing_releases_what_megatron_keeps_for_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffers have the sizes of the first shape; the library behind `ncclep` is set up once."""
    released: list[str] = []
    names = ("reset_hybrid_ep_buffer", "nccl_ep_finalize")
    kept = {name: partial(released.append, name) for name in names}
    monkeypatch.setitem(sys.modules, BUFFERS, SimpleNamespace(**kept))  # type: ignore[arg-type]
    close_dispatcher(SimpleNamespace())
    assert released == [*names]
    monkeypatch.delitem(sys.modules, BUFFERS)
    close_dispatcher(SimpleNamespace())  # nothing was imported
