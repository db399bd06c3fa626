"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ncclep.testing.launcher import RankPool

# Engines whose contract this run checks.
ENGINE_NAMES = ["reference"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="gloo",
        choices=("gloo", "nccl"),
        help="of the contract tests: gloo on the CPU, or nccl with one of four GPUs for each rank",
    )


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Four processes; a test that needs fewer ranks uses the first ones."""
    pool = RankPool(4, request.config.getoption("--backend"))
    yield pool
    pool.close()


@pytest.fixture(params=ENGINE_NAMES)
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param
