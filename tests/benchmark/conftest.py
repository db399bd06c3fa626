"""Two ranks that have imported Megatron-Core: on a CPU it needs patches that last."""

from __future__ import annotations

import pytest
from fixtures import closed
from imports import import_megatron_on_cpu
from rank_pool import RankPool
from timeouts import PatientPool

two_ranks = closed(lambda: PatientPool(2, prepare=import_megatron_on_cpu))


@pytest.fixture
def ctx(two_ranks: RankPool) -> RankPool:
    return two_ranks
