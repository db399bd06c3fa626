"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fixtures import closed
from imports import import_megatron_on_cpu
from rank_pool import RankPool
from timeouts import PatientPool

sys.path.append(str(Path(__file__).parents[1] / "contract"))  # test_nodes_static.py
# Megatron generates text with kernels of Triton's, which runs them on a CPU if told so early.
ENVIRONMENT = {"TRITON_INTERPRET": "1"}


def pool_of(num_ranks: int) -> RankPool:
    """Processes of their own: Megatron on a CPU needs patches that last."""
    return PatientPool(num_ranks, environment=ENVIRONMENT, prepare=import_megatron_on_cpu)


megatron_pool = closed(lambda: pool_of(4))
# One such process, which is a job.
lone_rank = closed(lambda: pool_of(1))


@pytest.fixture
def ctx(request: pytest.FixtureRequest) -> RankPool:
    """The pool on whose ranks the test runs (tests/on_ranks.py)."""
    is_alone = request.node.get_closest_marker("alone") is not None
    pool: RankPool = request.getfixturevalue("lone_rank" if is_alone else "megatron_pool")
    return pool
