"""How many processes a job has."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def num_ranks(backend: str, rank_counts: list[int]) -> int:
    """As many as there may be; on a CPU as few as can name another rank than the only other one."""
    return rank_counts[-1] if backend != "gloo" else min(rank_counts[-1], 3)
