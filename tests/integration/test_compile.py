"""torch.compile around our dispatcher: the bits of what is run eagerly, and an end to compiling."""

from __future__ import annotations

from typing import Any

import pytest
from compile_case import compiled_model_on_rank, compiled_on_rank
from megatron_versions import INSTALLED

from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankPool

CASES: dict[str, dict[str, Any]] = {
    "exact": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "static": {"ncclep": EpConfig(experts="grouped", max_recv_rows="worst")},
}


# What torch makes of our code does not depend on the release.
@pytest.mark.parametrize("megatron_release", [INSTALLED], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_compiled_layer(megatron_pool: RankPool, name: str) -> None:
    """torch went through the engine into the exchange of messages between hosts, and made 77 graphs
    of one layer, in a minute.
    """
    assert megatron_pool.run(compiled_on_rank, CASES[name]) == [[]] * megatron_pool.size


@pytest.mark.parametrize("megatron_release", [INSTALLED], indirect=True)
def test_compiled_model(megatron_pool: RankPool) -> None:
    """The first step compiles what there is, whatever numbers of rows come later."""
    for num_graphs in megatron_pool.run(compiled_model_on_rank):
        assert num_graphs[0] > 0
        assert set(num_graphs) == {num_graphs[0]}
