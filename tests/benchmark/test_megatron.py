"""The check of Megatron-Core's dispatchers: a result that a bug would give is rejected.

That right ones pass is what the smoke run shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatcher_bugs import put_into, setting_of

from megatron_ncclep.benchmark.megatron_setup import DispatcherChoice
from megatron_ncclep.benchmark.megatron_subject import MegatronSubject, PreparedDispatcher
from megatron_ncclep.benchmark.subjects import Setting, UnavailableError, make_workload
from megatron_ncclep.testing.cases import Case
from megatron_ncclep.testing.launcher import RankContext, RankPool

pytest.importorskip("megatron.core")

CASE = Case("case", (20, 20), 8, top_k=3, hidden=32, dtype=torch.bfloat16)


EXPECTED = {
    "swapped rows": "output",
    "reversed probabilities": "output",
    "wrong counts": "rows of each expert",
    "half the gradient of probabilities": "gradient of the probabilities",
    "a row without gradient": "gradient of the hidden states",
}


def check_on_rank(context: RankContext, dispatcher: str, bug: str) -> str | None:
    """Prepare a dispatcher whose rows pass through a bug on rank 1, and check it."""
    choice = DispatcherChoice(dispatcher, engine="reference" if dispatcher == "ncclep" else None)
    subject = MegatronSubject("x", choice)
    prepared = subject.prepare(setting_of(context), make_workload(CASE, context.rank))
    assert isinstance(prepared, PreparedDispatcher)
    if context.rank == 1:
        put_into(prepared._dispatcher, bug)
    try:
        return prepared.problem()
    finally:
        prepared.close()


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    """Two processes of their own: Megatron on a CPU needs patches that last."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "ncclep"])
def test_right_results_pass(two_ranks: RankPool, dispatcher: str) -> None:
    assert two_ranks.run(check_on_rank, dispatcher, "none") == [None, None]


@pytest.mark.parametrize("bug", EXPECTED)
@pytest.mark.parametrize("dispatcher", ["alltoall", "ncclep"])
def test_wrong_results_are_rejected(two_ranks: RankPool, dispatcher: str, bug: str) -> None:
    problems = [found for found in two_ranks.run(check_on_rank, dispatcher, bug) if found]
    assert any(EXPECTED[bug] in problem for problem in problems), problems


def test_without_megatron_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setting: Any = Setting(0, 1, "cpu", 60, lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UnavailableError, match=r"pip install 'megatron-ncclep\[train\]'"):
        MegatronSubject("alltoall", DispatcherChoice("alltoall")).prepare(
            setting, make_workload(CASE, 0)
        )
