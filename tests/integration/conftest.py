"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from imported import ImportedMegatron
from megatron_versions import importable, python_path

from megatron_ncclep.testing.launcher import RankPool


@pytest.fixture(scope="session", params=importable())
def megatron_release(request: pytest.FixtureRequest) -> str:
    """Each release in turn; pytest sorts the tests by it, so that one pool is alive at a time."""
    return request.param


@pytest.fixture(scope="session")
def megatron_pool(megatron_release: str) -> Iterator[RankPool]:
    """Four processes of their own with that release: Megatron on a CPU needs patches that last."""
    pool = RankPool(4, folders=python_path(megatron_release))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def imported() -> Iterator[ImportedMegatron]:
    """Megatron-Core imported, without our hooks; every run starts from there."""
    process = ImportedMegatron()
    yield process
    process.close()
