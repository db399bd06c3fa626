"""scripts/support.py claims no more than the tests show."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import support  # noqa: E402

MANY, FEW = "tests/gpu/test_gpu_moe_layer.py", "tests/gpu/test_gpu_quack.py"
GRAPHS = "tests/gpu/test_megatron_graphs.py"


@pytest.mark.parametrize(
    ("said", "cases", "expected"),
    [
        ("outputs with alltoall's, to the bit", [], "bits"),
        ("outputs to the bit (input gradients: one rounding)", [], "rounding"),
        ("losses with alltoall's, 1e-4", [], "rounding"),
        ("the errors of all ranks", [], "behaviour"),
        ("to the bit", [SimpleNamespace(same_bits=False)], "rounding"),
    ],
)
def test_what_a_marker_says(said: str, cases: list[Any], expected: str) -> None:
    assert support.strictness(said, cases) == expected


def test_of_several_comparisons_the_weakest_is_listed() -> None:
    """The list had the strictest: an option counted as equal to the bit if one test was."""
    collector = support.Collector()
    collector.works["some_option"]["a CPU"] |= {"bits", "rounding"}
    collector.works["some_option"]["several GPU ranks"] |= {"bits"}
    listed = "- `some_option`: rounding on a CPU; bits on several GPU ranks"
    assert support.compared(collector) == listed


@pytest.mark.parametrize(
    ("path", "fixtures", "since", "expected"),
    [
        ("tests/integration/dispatcher/test_moe_layer.py", [], "0.20", ("a CPU", "reference")),
        (MANY, [], "0.16", ("several GPU ranks", "native")),
        (FEW, [], "0.16", ("one GPU rank", "native")),
        (GRAPHS, ["one_rank"], "0.16", ("one GPU rank", "native")),
        (MANY, [], "0.20", ()),  # `make gpu` leaves it out
        ("tests/gpu/test_that_no_step_names.py", [], "0.16", ()),
    ],
)
def test_where_a_test_runs(path: str, fixtures: list[str], since: str, expected: Any) -> None:
    """Each GPU test counted for several GPUs, also what `make gpu` never runs."""
    marks = [SimpleNamespace(name="since", args=(since,))]
    item = SimpleNamespace(
        path=ROOT / path,
        fixturenames=fixtures,
        iter_markers=lambda name: [mark for mark in marks if mark.name == name],
        get_closest_marker=lambda name: None,
    )
    assert support.Collector().where(cast("pytest.Function", item)) == expected
