"""A rank that dies, stops or leaves out a call: the others' hosts say who it was, and end."""

from __future__ import annotations

import re

import pytest
from outcome import outcome
from rank import DEADLINE_S

pytestmark = [
    pytest.mark.needs_ranks(2),
    pytest.mark.needs_processes("its ranks end, each by itself: see tests/gpu/test_failures.py"),
]

# How the hosts agree: through shared memory, or over the process group.
LINKS = {"shared memory": {}, "process group": {"NCCLEP_HOST_EXCHANGE": "0"}}


@pytest.fixture(params=list(LINKS))
def link(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_no_answer(link: str, texts: list[str], phase: str, reason: str) -> None:
    """All ranks but the last say where they waited, and for whom if the memory tells.

    A rank may learn first that another one has given up, and name that one; whoever gave up first
    names the last rank.
    """
    last = len(texts) - 1
    whom = rf"rank ({last} {reason}|\d+ gave up)" if link == "shared memory" else ""
    for rank, text in enumerate(texts[:-1]):
        pattern = (
            rf"rank {rank} of {len(texts)}: no answer from the other ranks of the expert-parallel "
            rf"group in {phase}, call \d+ \(deadline {DEADLINE_S:g} s\): .*{whom}"
        )
        assert re.match(pattern, text), text
    if whom:
        assert any(re.search(f"rank {last} {reason}", text) for text in texts[:-1]), texts


def test_a_rank_that_dies(backend: str, engine_name: str, num_ranks: int, link: str) -> None:
    texts = outcome(backend, engine_name, "dies", num_ranks, **LINKS[link])
    assert_no_answer(link, texts, "dispatch", r"\(process \d+\) has died")


def test_a_rank_that_stops(backend: str, engine_name: str, num_ranks: int, link: str) -> None:
    texts = outcome(backend, engine_name, "stops", num_ranks, **LINKS[link])
    assert_no_answer(link, texts, "dispatch", "did not come")
    assert texts[-1] == ""


def test_a_rank_that_leaves_out_a_call(backend: str, engine_name: str, num_ranks: int) -> None:
    texts = outcome(backend, engine_name, "skips", num_ranks)
    where = ["combine"] * (num_ranks - 1) + ["plan"]
    for text in texts:
        for rank, phase in enumerate(where):
            assert re.search(rf"rank {rank} is in {phase}, call \d+", text), text
