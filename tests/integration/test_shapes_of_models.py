"""Whole models whose batches or layers are unusual, against `alltoall`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_case import LENGTHS, train_packed_on_rank

from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankPool

MODES = {"exact": EpConfig(), "static": EpConfig(max_recv_rows=512)}


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_equal_alltoall(megatron_pool: RankPool, mode: str) -> None:
    """Megatron's flex dispatcher with NCCL EP makes room for the first batch, and traps in a longer
    one; and all its ranks must have as many tokens.
    """
    options: dict[str, Any] = {"ncclep": MODES[mode]}
    assert len({sum(lengths) for step in LENGTHS for lengths in step}) > 6
    ours = megatron_pool.run(train_packed_on_rank, "ncclep", torch.float64, options)
    theirs = megatron_pool.run(train_packed_on_rank, "alltoall", torch.float64, {})
    assert_same(ours, theirs)


def assert_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    """All values within what another order of sums can make of them in fp64."""
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        assert any("experts" in name and value.any() for name, value in other.items())
        for name, value in other.items():
            error = (mine[name] - value).abs().max().item()
            assert error <= 1e-12 * max(1.0, value.abs().max().item()), f"rank {rank}: {name}"
