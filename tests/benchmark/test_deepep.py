"""DeepEP V2 and HybridEP in the benchmark: which package is there, and the check of their results.

The packages need GPUs; `Played` has the calls that the subjects make and computes with the oracle.
Neither is installed here: the imports above all tests show that nothing needs them at start.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import deepep
from benchmarks.catalogue import DEEPEP
from benchmarks.job import make_subject
from benchmarks.layer_model import BUFFERS, close_dispatcher
from megatron_ncclep.benchmark import Setting, UnavailableError, shapes
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.benchmark.table_oracle import table_combine, table_dispatch

RANK, SMS = 1, 20
CASE = Case(
    "others", (20, 30, 25), hidden=256, num_experts=6, top_k=3, alignment=16, dtype=torch.bfloat16
)


class Played:
    """Either buffer, on rank `RANK`.  A handle is the order of rows, for an expert's any.

    `faults` change the (rows, weights) of a "dispatch", or of a "combine" before its one rounding.
    """

    num_bytes = 0

    def __init__(self, work: Workload, **faults: Any) -> None:
        same = lambda *result: result  # noqa: E731
        self._work, self.sms = work, set[Any]()
        self.options: dict[str, Any] = {}  # that it was made with
        self._faults = {"dispatch": same, "combine": same, **faults}
        self.get_theoretical_num_sms = lambda num_experts, num_topk: SMS

    def dispatch(self, x: torch.Tensor, *, handle: Any = None, **options: Any) -> Any:
        work, table = self._work, self._work.tables[RANK]
        assert (options["do_expand"], options["do_zero_padding"]) == (True, True)
        self.sms.add(options.get("num_sms"))
        sent = work.every(shapes.X if handle is None else shapes.GRAD_OUT)
        assert torch.equal(x, sent[RANK])
        rows, w = table_dispatch(table, sent, work.every(shapes.WEIGHTS))
        assert w is not None
        is_padding = table.token_of_row < 0
        w = w.masked_fill(is_padding, float("nan"))  # anything may be there
        if handle is None:
            mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
            key = torch.repeat_interleave(table.padded) * 2 + is_padding  # which ends a block
            handle = mixed[key[mixed].argsort(stable=True)]
        rows, w = self._faults["dispatch"](rows[handle], w[handle])
        return rows, None, w, handle, None

    def combine(self, x: torch.Tensor, *, handle: Any, topk_weights: Any, **options: Any) -> Any:
        work, every_w = self._work, None
        self.sms.add(options.get("num_sms"))
        kind = shapes.Y if topk_weights is None else shapes.GRAD_ROWS
        every = [rows.float() for rows in work.every(kind)]
        every[RANK].index_copy_(0, handle, x.float())
        if topk_weights is not None:
            every_w = work.every(shapes.GRAD_WEIGHTS)
            every_w[RANK].index_copy_(0, handle, topk_weights)
        sums = table_combine(work.tables, list(CASE.tokens), RANK, CASE.top_k, every, every_w)
        out, w = self._faults["combine"](*sums)
        return out.bfloat16(), w, None

    def dispatch_with_permute(self, *, hidden: torch.Tensor, **options: Any) -> Any:
        is_padded = options["pad_multiple"] == CASE.alignment
        rows, _, w, handle, _ = self.dispatch(
            hidden, handle=options.get("handle"), do_expand=True, do_zero_padding=is_padded
        )
        return rows, w, None, None, handle

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Any, **options: Any) -> Any:
        out, w, _ = self.combine(hidden, handle=options["handle"], topk_weights=probs)
        wide = torch.zeros(len(out), CASE.num_experts)
        return out, None if w is None else wide.scatter_(1, self._work.topk_idx, w)


def installed(monkeypatch: pytest.MonkeyPatch, **classes: Any) -> None:
    """Let `deep_ep` be a package with `classes`."""
    package = ModuleType("deep_ep")
    package.__spec__ = ModuleSpec("deep_ep", None)
    vars(package).update(classes)
    monkeypatch.setitem(sys.modules, "deep_ep", package)


def subject_of(
    monkeypatch: pytest.MonkeyPatch, name: str, case: Case = CASE, **faults: Any
) -> tuple[Any, Played]:
    """The subject, and the buffer that it made."""
    work = Workload(case, RANK)
    played = Played(work, **faults)

    made = mock.Mock(return_value=played)
    installed(monkeypatch, ElasticBuffer=made, HybridEPBuffer=made)
    monkeypatch.setattr(deepep.dist, "all_reduce", lambda *args, **options: None)
    group: Any = SimpleNamespace()
    subject = make_subject(name, Setting(RANK, 3, "cpu", 60.0, lambda: group), work)
    played.options = made.call_args.kwargs
    return subject, played


@pytest.mark.parametrize("name", [*DEEPEP, "deepep@24"])
def test_rows_may_lie_in_any_order_within_an_expert(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same one in both directions of a handle; and a combine may round as it likes."""
    subject, played = subject_of(monkeypatch, name, combine=lambda out, w: (out * (1 + 2 / 256), w))
    for call in subject.passes.values():
        call()
    assert subject.problem() is None
    if name.startswith("deepep"):
        assert played.sms == {24 if "@" in name else SMS}
        assert subject.sms == f"{24 if '@' in name else SMS}, all"
        assert played.options["prefer_overlap_with_compute"] == (name != "deepep:no_overlap")


def swapped(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[-1:], rows[1:-1], rows[:1]])


FAULTS: dict[str, tuple[str, Any]] = {
    "a row at the wrong expert": ("dispatch", lambda rows, w: (swapped(rows), w)),
    "rows of other bits": ("dispatch", lambda rows, w: (rows * (1 + 1 / 128), w)),
    "a wrong weight": ("dispatch", lambda rows, w: (rows, swapped(w))),
    "sums off by four roundings": ("combine", lambda out, w: (out * (1 + 4 / 256), w)),
    "a weight of another token": ("combine", lambda out, w: (out, w if w is None else swapped(w))),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_wrong_results_are_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, change = FAULTS[fault]
    subject, _ = subject_of(monkeypatch, name, **{call: change})
    assert f"{call}: rank 1" in str(subject.problem())


def test_what_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    # DeepEP's combine would fail to compile, after a dispatch that works.
    for case, message in (
        (replace(CASE, dtype=torch.float32), r"bf16 rows only, and these are torch\.float32"),
        (replace(CASE, hidden=2880), "a multiple of 256 values, and these have 2880"),
    ):
        with pytest.raises(UnavailableError, match=message):
            subject_of(monkeypatch, "deepep", case)


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
