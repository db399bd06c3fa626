"""Fixtures for tests that need GPUs; not collected with --backend gloo (tests/conftest.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool
from timeouts import PatientPool

# What the CPU's tests share serves here too.
FOLDERS = ("contract", "native", "network", "integration", "integration/models")
sys.path += [str(Path(__file__).parents[1] / folder) for folder in FOLDERS]


@pytest.fixture
def ctx(megatron_pool: RankPool) -> RankPool:
    """The pool on whose ranks the test runs (tests/on_ranks.py)."""
    return megatron_pool


@pytest.fixture(scope="session")
def megatron_pool(backend: str, rank_counts: list[int], hosts: int) -> Iterator[RankPool]:
    """Processes of their own for Megatron: as many of the ranks asked for as divide 16 experts."""
    size = next(n for n in range(rank_counts[-1], 0, -1) if 16 % n == 0)
    pool = PatientPool(size, backend, hosts=hosts)
    yield pool
    pool.close()
