"""Low-latency mode: its check takes what an engine must give and nothing else; its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_result import sample_result

from benchmarks.plot import draw
from benchmarks.table import render
from megatron_ncclep.benchmark import Setting, table
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.shapes import Shape, Workload
from megatron_ncclep.ranks.group import EpGroup

SHAPE = Shape("small", tokens=5, hidden=16, experts=4, top_k=2)


@pytest.fixture
def prepared(process_group: dist.ProcessGroup) -> Iterator[LowLatencySubject]:
    setting = Setting(0, 1, "cpu", 60.0, lambda: dist.new_group([0]))
    made = LowLatencySubject("reference", setting, Workload(SHAPE.case(1, "cpu"), 0))
    yield made
    made.close()
    EpGroup.of(process_group).close()


def change(tensor: torch.Tensor) -> None:
    tensor.view(-1)[2] += 1


@pytest.mark.parametrize(
    ("name", "mutation", "message"),
    [
        ("rows", lambda rows: rows.copy_(rows.flip(1)), r"from rank 0: rows\[0, 0\] is .* rows di"),
        ("topk_idx", change, r"topk_idx\[1, 0\] is "),
        ("weights", change, r"weights\[1, 0\] is "),
        ("counts", lambda counts: counts.fill_(4), "4 rows, expected 5"),
        ("out", change, r"combine: rank 0: out\[0, 2\] is .*; 1 of 5 rows differ"),
    ],
)
def test_what_is_wrong_is_seen(
    prepared: LowLatencySubject, monkeypatch: pytest.MonkeyPatch, name: str,
    mutation: Callable[[torch.Tensor], Any], message: str,
) -> None:  # fmt: skip
    assert prepared.problem() is None
    changed = "combine" if name == "out" else "dispatch"
    original = getattr(prepared, changed)

    def wrong() -> Any:
        result = original()
        mutation(result if name == "out" else getattr(result, name))
        return result

    monkeypatch.setattr(prepared, changed, wrong)
    with pytest.raises(AssertionError, match=message):
        assert prepared.problem() is None, prepared.problem()


def test_numbers_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """101 operations from 7 us on: the median is 57, the 99th percentile 106."""
    monkeypatch.setattr(table, "WIDTH", 200)  # all of an object in one line
    result = sample_result()
    text = render(result)
    lines = [line.split() for line in text.splitlines()]
    for row in (
        "native, T 1 57.0 106.0 56.0 105.0 63.0 112.0 14.3 30.0 ok",
        "native, T 8 57.0 106.0 56.0 105.0 70.0 119.0 114.7 30.0 ok",
    ):
        assert row.split() in lines
    assert text.count("low-latency mode: H 7168, E 256, K 8, bfloat16") == 1
    assert "reference, T 8: not measured: it is not there" in text
    assert "NO GPU" not in text
    result["low_latency"][0]["on_gpu"] = False
    result["low_latency"][1] |= {"error": "it died", "subjects": []}
    text = render(result)
    assert "NO GPU WAS USED" in text
    assert "T 8: nothing was measured: it died" in text
    draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
