"""Two ranks that have imported Megatron-Core: on a CPU it needs patches that last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from imports import import_megatron_on_cpu
from patience import PatientPool

from megatron_ncclep.ranks.pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = PatientPool(2, prepare=import_megatron_on_cpu)
    yield pool
    pool.close()


@pytest.fixture
def ctx(two_ranks: RankPool) -> RankPool:
    return two_ranks
