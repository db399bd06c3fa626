"""The check of low-latency mode: what an engine must give, and nothing that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import Setting
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.shapes import Shape, Workload
from megatron_ncclep.ranks.group import EpGroup

SHAPE = Shape("small", tokens=5, hidden=16, experts=4, top_k=2)


@pytest.fixture
def prepared() -> Iterator[LowLatencySubject]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    setting = Setting(0, 1, "cpu", 60.0, lambda: dist.new_group([0]))
    made = LowLatencySubject("reference", setting, Workload(SHAPE.case(1, "cpu"), 0))
    yield made
    made.close()
    EpGroup.of(dist.group.WORLD).close()
    dist.destroy_process_group()


def swap(rows: torch.Tensor) -> None:
    rows[0, [1, 3]] = rows[0, [3, 1]]


def change(tensor: torch.Tensor) -> None:
    tensor.view(-1)[2] += 1


@pytest.mark.parametrize(
    ("name", "mutation", "message"),
    [
        ("rows", swap, r"from rank 0: rows\[1, 0\] is .*; 2 of 5 rows differ"),
        ("topk_idx", change, r"topk_idx\[1, 0\] is "),
        ("weights", change, r"weights\[1, 0\] is "),
        ("counts", lambda counts: counts.fill_(4), "4 rows, expected 5"),
        ("out", change, r"combine: rank 0: out\[0, 2\] is .*; 1 of 5 rows differ"),
    ],
)
def test_what_is_wrong_is_seen(
    prepared: LowLatencySubject,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutation: Callable[[torch.Tensor], Any],
    message: str,
) -> None:
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
