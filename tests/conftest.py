"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ncclep.testing.launcher import RankPool

# Engines whose contract this run checks.
ENGINE_NAMES = ["reference"]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four processes; a test that needs fewer ranks uses the first ones."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(params=ENGINE_NAMES)
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param
