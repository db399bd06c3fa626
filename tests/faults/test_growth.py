"""A training of days: what a process holds does not depend on how many rounds or engines it had.

`--iterations N` makes it N rounds and a tenth as many engines, if that is more than the default.
On 2026-11-22, 10,000 rounds of two ranks over gloo took 101 s and left a process 0.4 MB of heap and
2 MB of resident memory more than after 500; 1,000 engines took 16 s.
"""

from __future__ import annotations

import pytest
from growth import Held, grow_on_rank

from megatron_ncclep.ranks.pool import RankPool

pytestmark = [
    pytest.mark.needs_ranks(2),
]

NUM_ROUNDS, NUM_ENGINES = 300, 50
# A round has six calls at least, each with a message of 96 bytes from either rank: to keep what one
# of them took would be more than that, and without a leak it is 10 to 70 bytes.
HEAP_BYTES_PER_STEP = 512
# The pages that malloc has touched, wherever its free blocks lie, and code that was first needed.
RESIDENT_BYTES = 2**24
# What the driver keeps of kernels that were first needed; windows of one engine are as large.
DEVICE_BYTES = 2**25


def test_nothing_grows(pool: RankPool, engine_name: str, iterations: int) -> None:
    counts = {
        "rounds": max(NUM_ROUNDS, iterations),
        "engines": max(NUM_ENGINES, iterations // 10),
    }
    answers = pool.run(
        grow_on_rank, engine_name, *counts.values(), ranks=2, timeout=300 + counts["rounds"]
    )
    for rank, held in enumerate(answers):
        for what, (before, after) in held.items():
            assert_no_growth(before, after, counts[what], f"rank {rank}, {counts[what]} {what}")


def assert_no_growth(before: Held, after: Held, count: int, what: str) -> None:
    for name in ("files", "memories", "threads", "objects", "device"):
        assert getattr(after, name) == getattr(before, name), f"{what}: {name}"
    heap = after.heap - before.heap
    assert heap <= count * HEAP_BYTES_PER_STEP, f"{what}: {heap} bytes more on the heap"
    resident = after.resident - before.resident
    assert resident <= RESIDENT_BYTES, f"{what}: {resident} bytes more in memory"
    used = after.device_used - before.device_used
    assert used <= DEVICE_BYTES, f"{what}: {used} bytes more of the GPU"
