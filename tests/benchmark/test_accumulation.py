"""Layers and experts alone add weight gradients to main_grad: once, and to what is there.

And experts alone: right ones pass the check, wrong ones do not.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from dispatcher_bugs import BUGS
from imports import import_megatron_on_cpu
from patience import PatientPool
from prepared_subject import CASES, FFN, prepared_on

from megatron_ncclep.benchmark.experts import blocks_of
from megatron_ncclep.benchmark.layer_reference import (
    expert_gradients,
    gradients_problem,
    received_rows,
)
from megatron_ncclep.benchmark.timing import Timer
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.ranks.pool import RankContext, RankPool

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

GROUPED_LAYER = "layer:ncclep:reference:grouped"
LAYERS = ["layer:alltoall", GROUPED_LAYER, f"{GROUPED_LAYER}:full_iteration"]
EXPERTS = ["experts:megatron", "experts:grouped", "experts:grouped:full_iteration"]
WRONG_ROWS = {
    "swapped rows": "output",
    "reversed probabilities": "output",
    "wrong counts": "output",
    "half the gradient of probabilities": "gradient of the probabilities",
    "a row without gradient": "gradient of the rows",
}


# --- what could go wrong with a main_grad --------------------------------------------------------


def overwritten(weight: Any, backward: Callable[[], Any]) -> Any:
    weight.main_grad.zero_()
    return backward()


def added_twice(weight: Any, backward: Callable[[], Any]) -> Any:
    before = weight.main_grad.clone()
    results = backward()
    weight.main_grad.add_(weight.main_grad - before)
    return results


def dropped(weight: Any, backward: Callable[[], Any]) -> Any:
    before = weight.main_grad.clone()
    results = backward()
    weight.main_grad.copy_(before)
    return results


WRONG_GRADIENTS = {
    overwritten: "sum of 2",  # the first one was written over zeros
    added_twice: "sum of 1",
    dropped: "sum of 1",
}


def gradient_bug_on_rank(context: RankContext, name: str, bug: Callable[..., Any]) -> str | None:
    """Check a subject that does `bug` with one expert's weight on rank 1."""
    prepared = prepared_on(context, name, Workload(CASES["bf16"], context.rank, FFN))
    experts = prepared._shared.module.experts
    *_, weight = experts.parameters()  # of the last expert
    add_gradients = prepared._add_gradients
    if context.rank == 1:
        prepared._add_gradients = lambda out: bug(weight, lambda: add_gradients(out))
    try:
        return prepared.problem()
    finally:
        prepared.close()


def rounds_on_rank(context: RankContext) -> list[str | None]:
    """Rounds of two subjects in turns, as they are timed; what their main_grads are after each.

    This package's experts tell the hooks that they have added their gradients, and Megatron's, on a
    CPU, leave it to the hooks.
    """
    workload = Workload(CASES["bf16"], context.rank, FFN)
    subjects = [prepared_on(context, name, workload) for name in (GROUPED_LAYER, "layer:alltoall")]
    layer, received = subjects[0]._shared.module, received_rows(workload, context.rank)
    timer = Timer(context.group, "cpu")
    clocks = [subject.clock(timer) for subject in subjects]
    problems = []
    for clock in clocks * 2:
        clock()
        expected = expert_gradients(layer, received)
        problems.append(gradients_problem(layer, workload, context.rank, expected, 1))
    for subject in subjects:
        subject.close()
    return problems


def experts_on_rank(context: RankContext, name: str, case: str, bug: str) -> str | None:
    """Prepare experts that get something wrong on rank 1, run them as if timed, and check them."""
    prepared = prepared_on(context, name, Workload(CASES[case], context.rank, FFN))
    experts, change = prepared._experts, BUGS[bug]
    if context.rank == 1 and change is not None:
        prepared._experts = lambda *args: experts(*change(*args))
    try:
        for call in prepared.passes.values():
            call()
        return prepared.problem()
    finally:
        prepared.close()


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    """Two processes of their own: Megatron on a CPU needs patches that last."""
    pool = PatientPool(2, prepare=import_megatron_on_cpu)
    yield pool
    pool.close()


@pytest.mark.parametrize("bug", WRONG_GRADIENTS)
@pytest.mark.parametrize("name", [*LAYERS, *EXPERTS])
def test_wrong_gradients_are_rejected(
    two_ranks: RankPool, name: str, bug: Callable[..., Any]
) -> None:
    right, wrong = two_ranks.run(gradient_bug_on_rank, name, bug)
    assert right is None
    assert "gradient of experts." in str(wrong)
    assert WRONG_GRADIENTS[bug] in str(wrong)


def test_a_round_adds_one_pass(two_ranks: RankPool) -> None:
    assert two_ranks.run(rounds_on_rank) == [[None] * 4] * 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EXPERTS)
def test_right_experts_pass(two_ranks: RankPool, name: str, case: str) -> None:
    assert two_ranks.run(experts_on_rank, name, case, "none") == [None, None]


@pytest.mark.parametrize("bug", WRONG_ROWS)
@pytest.mark.parametrize("name", EXPERTS)
def test_wrong_experts_are_rejected(two_ranks: RankPool, name: str, bug: str) -> None:
    right, wrong = two_ranks.run(experts_on_rank, name, "bf16", bug)
    assert right is None
    assert WRONG_ROWS[bug] in str(wrong)


def test_blocks() -> None:
    place, lengths = blocks_of(torch.tensor([2, 0, 17]), grouped=True)
    assert lengths.tolist() == [32, 0, 16]
    assert place.tolist() == [32, 33, *range(17)]
    place, lengths = blocks_of(torch.tensor([2, 0, 17]), grouped=False)
    assert (lengths.tolist(), place.tolist()) == ([2, 0, 17], [*range(19)])
