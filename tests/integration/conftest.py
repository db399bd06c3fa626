"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from imported import ImportedMegatron

from megatron_ncclep.testing.launcher import RankPool


@pytest.fixture(scope="session")
def megatron_pool() -> Iterator[RankPool]:
    """Four processes of their own: Megatron on a CPU needs patches that last."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def imported() -> Iterator[ImportedMegatron]:
    """Megatron-Core imported, without our hooks; every run starts from there."""
    process = ImportedMegatron()
    yield process
    process.close()
