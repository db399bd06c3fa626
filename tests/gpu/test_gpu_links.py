"""NCCL's own messages over the links of the test network.

    pytest tests/gpu/test_gpu_links.py --backend nccl --engine hierarchical --ranks 4 --hosts 2 \
        --network loop-all
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from loop import net_counters
from on_ranks import gathered
from rank_pool import RankContext

PLUGIN = os.environ.get("NCCL_NET_PLUGIN", "")
GATHERED = 64 << 10  # bytes, at most
pytestmark = [
    pytest.mark.needs_network,
    pytest.mark.limit_s(90),
    pytest.mark.skipif(not PLUGIN, reason="--network loop-all"),
]


def settled() -> dict[str, int]:
    """The counters once nothing has been sent for a moment: a send counts in several of them."""
    found: dict[str, int] = {}
    while found != (found := net_counters(PLUGIN)):
        time.sleep(0.1)
    return found


def test_all_to_alls_go_over_the_links(ctx: RankContext, hosts: int) -> None:
    """Bytes between hosts, and no others, and those from GPU to GPU."""
    R, num_bytes = ctx.num_ranks, 4 << 20
    source = torch.full((R, num_bytes), ctx.rank, dtype=torch.uint8, device=ctx.device)
    source += torch.arange(R, dtype=torch.uint8, device=ctx.device)[:, None] * 16
    target = torch.empty_like(source)
    dist.all_to_all_single(target, source, group=ctx.group)  # connects
    torch.cuda.synchronize()
    target.zero_()
    gathered(ctx, None)
    before = settled()
    dist.all_to_all_single(target, source, group=ctx.group)
    torch.cuda.synchronize()
    after = settled()
    expected = torch.arange(R, dtype=torch.uint8, device=ctx.device) + 16 * ctx.rank
    assert bool((target == expected[:, None]).all())
    # What was gathered before may still have been on its way.
    moved = after["bytes"] - before["bytes"] - num_bytes * (R - R // hosts)
    assert 0 <= moved < GATHERED
    assert after["direct"] - before["direct"] == after["sends"] - before["sends"]
    gathered(ctx, None)
