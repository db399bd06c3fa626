"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from imports import import_megatron_on_cpu
from patience import PatientPool

from megatron_ncclep.ranks.pool import RankPool

# Megatron generates text with kernels of Triton's, which runs them on a CPU if told so early.
ENVIRONMENT = {"TRITON_INTERPRET": "1"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: `ctx` is the only rank of its job")


@pytest.fixture(scope="session")
def megatron_pool() -> Iterator[RankPool]:
    """Four processes of their own: Megatron on a CPU needs patches that last."""
    pool = PatientPool(4, "gloo", environment=ENVIRONMENT, prepare=import_megatron_on_cpu)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def lone_rank() -> Iterator[RankPool]:
    """One such process, which is a job."""
    pool = PatientPool(1, "gloo", environment=ENVIRONMENT, prepare=import_megatron_on_cpu)
    yield pool
    pool.close()


@pytest.fixture
def ctx(request: pytest.FixtureRequest) -> RankPool:
    """The pool on whose ranks the test runs (tests/on_ranks.py)."""
    is_alone = request.node.get_closest_marker("alone") is not None
    pool: RankPool = request.getfixturevalue("lone_rank" if is_alone else "megatron_pool")
    return pool
