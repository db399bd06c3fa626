"""Two ranks that have imported Megatron-Core: on a CPU it needs patches that last.

Leaves out what needs CollectiveX where it is not unpacked: not skipped, and listed by name.
"""

from __future__ import annotations

import pytest
from deselect import leave_out
from fixtures import closed
from imports import import_megatron_on_cpu
from rank_pool import RankPool
from stand_ins import collectivex_folder
from timeouts import PatientPool

two_ranks = closed(lambda: PatientPool(2, prepare=import_megatron_on_cpu))


@pytest.fixture
def ctx(two_ranks: RankPool) -> RankPool:
    return two_ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if not collectivex_folder().is_dir():
        whole = "experimental/CollectiveX of github.com/SemiAnalysisAI/InferenceX"
        reason = f"no CollectiveX: copy {whole} to {collectivex_folder()}"
        needing = [item for item in items if item.path.stem == "test_collectivex"]
        leave_out(config, items, dict.fromkeys(needing, reason))
