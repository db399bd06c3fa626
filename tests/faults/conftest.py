"""How many processes a job has, and what starts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fork_server import ForkServer
from outcome import outcome


@pytest.fixture(scope="session")
def num_ranks(backend: str, rank_counts: list[int]) -> int:
    """As many as there may be; on a CPU as few as can name another rank than the only other one."""
    return rank_counts[-1] if backend != "gloo" else min(rank_counts[-1], 3)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    server = ForkServer("rank")
    yield server
    server.close()


@pytest.fixture
def end_of(
    server: ForkServer, backend: str, engine_name: str, num_ranks: int
) -> Callable[..., list[str]]:
    """What came of a job with a fault, as `outcome` says."""

    def run(fault: str, **environment: str) -> list[str]:
        return outcome(server, backend, engine_name, fault, num_ranks, **environment)

    return run
