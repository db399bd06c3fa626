"""Kernels put over a network: what NCCL's device functions and our waits do between hosts.

    pytest tests/gpu/test_gpu_network.py --backend nccl --engine native --ranks 4 --hosts 2 \
        --network loop
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from loop import counters
from on_ranks import gathered

from megatron_ncclep.errors import PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext

pytestmark = [pytest.mark.needs_network, pytest.mark.limit_s(90)]
PLUGIN = os.environ.get("NCCL_RMA_PLUGIN", "")
START_S, DEADLINE_S = 60.0, 3.0


@contextmanager
def network(ctx: RankContext, fails: bool, fault: str = "") -> Iterator[tuple[Any, Any]]:
    """Rails and a window of a group of their own.

    Args:
        fails: at the end this rank gives them up, as after a failure, without the other ranks.
        fault: of this rank's link (tests/network/link.h).
    """
    if fault:
        os.environ["RMA_LOOP_FAULT"] = fault
    native, group = extension.load(), EpGroup.of(ctx.group)
    try:
        communicator = communicator_of(group, START_S)
        window = native.Window(communicator, 1 << 20, over_network=True)
        rails = native.Rails(communicator, START_S)
        yield rails, window
        if not fails:
            rails.close()
            window.close()
    finally:
        os.environ.pop("RMA_LOOP_FAULT", None)
        group.close(alone=fails)


def test_words_reach_the_rail_peers(ctx: RankContext, hosts: int) -> None:
    """One message of 8 bytes to each, and no other; the window's own peers are this host's."""
    with network(ctx, fails=False) as (rails, window):
        assert rails.num_domains == hosts
        assert rails.transport == "proxy"
        assert len(window.peers) == ctx.num_ranks // hosts
        before = counters(PLUGIN)
        gathered(ctx, None)  # before any rank puts
        for _ in range(20):
            rails.probe(window, DEADLINE_S)
        gathered(ctx, None)
        after = counters(PLUGIN)
        puts = 20 * (hosts - 1)
        moved = {name: after[name] - before[name] for name in after}
        assert moved == {"puts": puts, "bytes": 8 * puts, "bytes_in": 8 * puts, "refused": 0}
        gathered(ctx, None)


@pytest.mark.parametrize("fault", ["stop", "drop"])
def test_a_put_that_does_not_come_is_named_in_time(
    ctx: RankContext, hosts: int, fault: str
) -> None:
    """Rank 0's third put goes nowhere: the rail peer that it was for says so, and no other."""
    local_ranks = ctx.num_ranks // hosts
    # The counters go on from test to test.
    number = counters(PLUGIN)["puts"] + 2 * (hosts - 1) + 1
    mine = f"{fault}:{number}" if ctx.rank == 0 else ""
    with network(ctx, fails=True, fault=mine) as (rails, window):
        for _ in range(2):
            rails.probe(window, DEADLINE_S)
            gathered(ctx, None)
        start, text = time.monotonic(), ""
        try:
            rails.probe(window, DEADLINE_S)
        except PeerError as error:
            text = str(error)
        assert time.monotonic() - start < START_S
        texts = gathered(ctx, text)
    torch.cuda.synchronize()
    peers = [domain * local_ranks for domain in range(1, hosts)]
    missed = [rank for rank, text in enumerate(texts) if text]
    # With several peers it is open which of them is the first that a kernel puts to.
    assert set(missed) <= set(peers)
    assert len(missed) == (len(peers) if fault == "stop" else 1)
    for rank in missed:
        assert f"rank {rank} of {ctx.num_ranks}: put number 3 of rank 0" in texts[rank]
