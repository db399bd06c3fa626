"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fixtures import closed
from fork_server import ForkServer
from rank_pool import RankPool
from timeouts import PatientPool

sys.path.append(str(Path(__file__).parents[1] / "contract"))  # test_nodes_static.py
# Megatron generates text with kernels of Triton's, which runs them on a CPU if told so early.
ENVIRONMENT = {"TRITON_INTERPRET": "1"}


# A process of its own, which forks all ranks: Megatron on a CPU needs patches that last.
megatron = closed(lambda: ForkServer("imports:import_megatron_on_cpu", **ENVIRONMENT))


@pytest.fixture(scope="session")
def megatron_pool(megatron: ForkServer) -> Iterator[RankPool]:
    with closing(PatientPool(4, imports=megatron)) as pool:
        yield pool


@pytest.fixture(scope="session")
def lone_rank(megatron: ForkServer) -> Iterator[RankPool]:
    """One process, which is a job."""
    with closing(PatientPool(1, imports=megatron)) as pool:
        yield pool


@pytest.fixture
def ctx(request: pytest.FixtureRequest) -> RankPool:
    """The pool on whose ranks the test runs (tests/on_ranks.py)."""
    is_alone = request.node.get_closest_marker("alone") is not None
    pool: RankPool = request.getfixturevalue("lone_rank" if is_alone else "megatron_pool")
    return pool
