"""Copies of a model, as averages of weights (EMA) need them: they use the same engines."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_setup import BATCH, HIDDEN, SEQUENCE, drawn, new_layer
from rank_pool import RankContext
from torch.optim.swa_utils import AveragedModel

import megatron_ncclep
from megatron_ncclep.config import EpConfig

FOLLOWS = EpConfig(max_recv_rows="auto", on_overflow="rerun", metrics_interval=1)
STATIC = EpConfig(max_recv_rows="worst")


@pytest.mark.parametrize("options", [EpConfig(), STATIC, FOLLOWS], ids=["exact", "static", "auto"])
def test_a_copy_of_a_layer_uses_its_engines(ctx: RankContext, options: EpConfig) -> None:
    """`copy.deepcopy` of a model ended in "cannot pickle HostExchange", of the engine's hosts.

    Megatron's own modules hold process groups, which a copy shares too: who copies a model says so.
    """
    layer = new_layer(ctx.num_ranks, ncclep=options)
    shared: Any = {dist.ProcessGroup: lambda group, memo: group}
    with mock.patch.dict(copy._deepcopy_dispatch, shared):  # type: ignore[attr-defined]
        copied = AveragedModel(layer).module
    assert copied.token_dispatcher is not layer.token_dispatcher
    assert copied.token_dispatcher.engines is layer.token_dispatcher.engines
    hidden = drawn(ctx.rank, SEQUENCE, BATCH, HIDDEN)
    expected = layer(hidden)[0]
    assert expected.any()
    assert torch.equal(copied(hidden)[0], expected)
    for weight in copied.experts.parameters():
        weight.data.zero_()
    assert not copied(hidden)[0].any()
    assert torch.equal(layer(hidden)[0], expected)
    megatron_ncclep.close(layer.token_dispatcher.group)  # other tests count at another interval
