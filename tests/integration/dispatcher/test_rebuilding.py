"""Models that are built one after the other in a process leave nothing behind: with groups of their
own, which Megatron forgets between two models, and over the same groups.

Reinforcement learning, elastic restarts and notebooks build many.  Each left behind windows of
gigabytes with `native`, and counters that every later model's metrics exchanged.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fork_server import ForkServer
from megatron_setup import build_layer, initialize, make_config, new_layer
from rank_pool import RankContext, RankPool
from rebuilding_case import growth, held, mapped
from timeouts import PatientPool, patient

import megatron_ncclep
from megatron_ncclep import metrics
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import GroupClosedError, PeerError
from megatron_ncclep.metrics import Metrics
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

LAYERS, RANKS, MODELS = 2, 2, 8
LONG_S = patient(60)
EXPERTS = 4


def share_windows(group: EpGroup) -> mock.Mock:
    """Let the group hold what stands in for `native`'s windows."""
    windows = mock.Mock(Resource, **{"device_waited_ns.return_value": 0})
    group.resources.share("windows", lambda: windows)
    return windows


def ends(windows: mock.Mock) -> list[str]:
    """How it was closed."""
    return [name for name, *_ in windows.method_calls if name in ("close", "abort")]


def build(engine: str) -> list[Any]:
    """The layers of a model, which have counted something."""
    options = EpConfig(engine=engine, metrics_interval=1, max_recv_rows=52, timeout_s=LONG_S)
    config = make_config("ncclep", torch.float32, RANKS, ncclep=options)
    layers = [build_layer(config) for _ in range(LAYERS)]
    for layer in layers:
        layer(torch.randn(4, 4, config.hidden_size, requires_grad=True))[0].sum().backward()
    return layers


@pytest.fixture(scope="module")
def megatron_pool(megatron: ForkServer) -> Iterator[RankPool]:
    """Two processes in which nothing else runs."""
    with closing(PatientPool(RANKS, imports=megatron)) as pool:
        yield pool


def test_models_with_groups_of_their_own(ctx: RankContext) -> None:
    os.environ["NCCLEP_LOCAL_RANKS"] = "1"  # the engine makes a process group for each node, too
    from megatron.core import parallel_state

    seen = []
    for _ in range(MODELS + 1):
        initialize(RANKS)  # destroys the groups that Megatron has forgotten
        seen.append(held())
        layers = build("hierarchical")
        windows = share_windows(EpGroup.of(layers[0].token_dispatcher.group))
        assert len(metrics.after_step()) == 1, "an earlier model's group has metrics"
        assert mapped() == 1
        parallel_state.destroy_model_parallel()
        # At once, while the model is alive and torch still has the process groups.
        assert (mapped(), ends(windows)) == (0, ["close"])
        words = r"destroy_model_parallel.*build the model\) again"
        with pytest.raises(GroupClosedError, match=words):
            layers[0](torch.randn(4, 4, layers[0].config.hidden_size))
        del layers, windows
    assert growth(seen) == {}, growth(seen)


def test_models_over_the_same_groups(ctx: RankContext) -> None:
    """Rank 0 lets go of a model when it has built the next one, rank 1 before."""
    os.environ.pop("NCCLEP_LOCAL_RANKS", None)
    initialize(RANKS)
    seen, exchanged = [], []
    layers: list[Any] = []
    for _ in range(MODELS):
        if ctx.rank == 1:
            layers.clear()
            gc.collect()
        layers = build("reference")
        (interval,) = metrics.after_step()
        assert sum(map(sum, interval.rows)) > 0
        megatron_ncclep.check()
        group = EpGroup.of(layers[0].token_dispatcher.group)
        exchanged.append(len(Metrics.of(group, 1, LONG_S)._layers))
        seen.append(held())
    megatron_ncclep.close()
    megatron_ncclep.close()
    assert mapped() == 0
    assert exchanged == [LAYERS] * MODELS, exchanged  # layers in each exchange
    assert growth(seen) == {}, growth(seen)


def test_a_rank_that_does_not_come_keeps_nobody(ctx: RankContext) -> None:
    """After a failure of one rank the others free their own part, within the deadline.

    Rank 0 comes to no close; both can go on.
    """
    config = EpConfig(engine="reference", timeout_s=LONG_S)
    engine = megatron_ncclep.create_engine(ctx.group, EXPERTS, config)
    group = EpGroup.of(ctx.group)
    windows = share_windows(group)
    logger = logging.getLogger("megatron_ncclep")
    with mock.patch.object(logger, "handle") as said:
        if ctx.rank == 1:
            group.timeout_s = 0.1
            megatron_ncclep.close(ctx.group)
            assert (mapped(), ends(windows)) == (0, ["abort"])
            with pytest.raises(GroupClosedError, match="create the engine"):
                engine.plan(torch.zeros(1, 1, dtype=torch.int64))
        dist.barrier(ctx.group)
        if ctx.rank == 0:
            with pytest.raises(PeerError, match="rank 1"):
                engine.plan(torch.zeros(1, 1, dtype=torch.int64))
            megatron_ncclep.close(ctx.group)
            assert (mapped(), ends(windows)) == (0, ["abort"])
    again = megatron_ncclep.create_engine(ctx.group, EXPERTS, config)
    plan = again.plan(torch.zeros(1, 1, dtype=torch.int64))
    megatron_ncclep.close(ctx.group)
    assert plan.num_rows == (RANKS if ctx.rank == 0 else 0)
    (line,) = (call.args[0].getMessage() for call in said.mock_calls)
    assert f"rank {ctx.rank} of {RANKS} of an expert-parallel group: closed without" in line, line


@pytest.mark.alone
@pytest.mark.each_release
@pytest.mark.parametrize("how", ["close", "abort"])
def test_groups_are_closed_before_megatron_forgets_its_own(ctx: RankContext, how: str) -> None:
    """After an error without waiting; a group that is not Megatron's stays."""
    layer = new_layer(1)
    from megatron.core import parallel_state

    other = dist.new_group([0])
    for process_group in (parallel_state.get_expert_model_parallel_group(), other):
        windows = share_windows(EpGroup.of(process_group))
        for name in ("close", "abort"):
            getattr(windows, name).side_effect = lambda name=name: ended.append(
                (name, parallel_state.model_parallel_is_initialized())
            )
    ended: list[tuple[str, bool]] = []  # how, and whether Megatron still had its groups
    try:
        if how == "abort":
            raise ZeroDivisionError
        parallel_state.destroy_model_parallel()
    except ZeroDivisionError:
        parallel_state.destroy_model_parallel()
    assert ended == [(how, True)]
    with pytest.raises(GroupClosedError, match=r"build the model\) again"):
        layer(torch.zeros(1, 1, layer.config.hidden_size))
    parallel_state.destroy_model_parallel()  # nothing is left to close
    megatron_ncclep.close(other)
    assert ended[1:] == [("close", False)]
