"""The hosts agree and a device is late: kernels give up at the deadline and the next call says so.

Only for engines that promise it; NVIDIA's library has limits of its own, and the reference engine
waits on the host.
"""

from __future__ import annotations

import re

import pytest
from outcome import outcome
from rank import DEADLINE_S

pytestmark = [
    pytest.mark.needs_ranks(2),
    pytest.mark.needs_processes("its ranks end, each by itself: see tests/gpu/test_failures.py"),
    pytest.mark.needs_caps(test=lambda caps: caps.device_deadline),
]


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("late_plan", "plan"),
        ("late_dispatch", "dispatch"),
        ("late_combine", "combine"),
        ("dies_late", "dispatch"),
    ],
)
def test_a_device_that_is_late(
    backend: str, engine_name: str, num_ranks: int, fault: str, phase: str
) -> None:
    *others, late = outcome(backend, engine_name, fault, num_ranks)
    operations = set()
    for rank, text in enumerate(others):
        found = re.match(
            rf"rank {rank} of {num_ranks}: rank {num_ranks - 1} did not come in {phase}, "
            rf"operation (\d+) of the group \(deadline {DEADLINE_S:g} s\)",
            text,
        )
        assert found, text
        operations.add(found[1])
    assert len(operations) == 1  # they were all in the same one
    if fault != "dies_late":
        # When it comes, the others have gone, which its host or its kernels find out.
        assert re.match(
            rf"rank {num_ranks - 1} of {num_ranks}: (no answer from the other ranks"
            r"|rank \d+ did not come in)",
            late,
        ), late
