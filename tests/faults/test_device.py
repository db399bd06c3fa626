"""The hosts agree and a rank dies: kernels give up at the deadline and the next call says so.

Of a rank that lives and is late: tests/gpu/test_failures.py.

Only for engines that promise it; NVIDIA's library has limits of its own, and the reference engine
waits on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from contract_cases import local_ranks
from rank import DEADLINE_S

pytestmark = [
    pytest.mark.needs_ranks(2),
    pytest.mark.needs_caps(test=lambda caps: caps.name == "native"),
]


def assert_device_gave_up(texts: list[str], num_ranks: int, phase: str) -> None:
    """The ranks but the last were all in the same operation, and one of them at least names it.

    The others may have heard first that a rank had given up, and then name that one.  Over several
    hosts, a process may die with what its plan puts still on the way.
    """
    phases = phase if local_ranks() is None else rf"{phase}|plan, receiving routes"
    operations = set()
    for rank, text in enumerate(texts):
        found = re.match(
            rf"PeerError: rank {rank} of {num_ranks}: rank \d did not come in ({phases}),"
            rf" operation (\d+) of the group \(deadline {DEADLINE_S:g} s\)",
            text,
        )
        assert found, text
        operations.add(found.groups())
    assert len(operations) == 1 or local_ranks() is not None
    assert any(f"rank {num_ranks - 1} did not come" in text for text in texts), texts


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        # With its kernel queued, behind work that takes longer than the deadline.
        ("dies_late", "dispatch"),
        # Its host has entered a step whose kernel it never queues.
        ("dies_in_dispatch", "dispatch"),
    ],
)
def test_a_rank_that_fails_inside_a_step(
    end_of: Callable[..., list[str]], fault: str, phase: str
) -> None:
    *others, last = end_of(fault)
    assert_device_gave_up(others, len(others) + 1, phase)
    assert last == ""


def test_a_rank_without_memory_refuses_the_call(end_of: Callable[..., list[str]]) -> None:
    """It has all memory of a step before it enters, so that the others hear of it."""
    *others, last = end_of("runs_out_of_memory")
    assert re.match(rf"(Input|Refused)Error: dispatch: rank {len(others)}: .*memory", last), last
    assert set(others) == {last}
