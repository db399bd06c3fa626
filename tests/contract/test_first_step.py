"""The first step of a group has a longer deadline, because a rank that compiles is late.

With 60 s, the other ranks took a rank that compiled for longer for dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext
from run_case import own_group

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.errors import PeerError
from megatron_ncclep.ranks.group import EpGroup

# Hosts wait as long whatever the engine; what devices are given is in tests/native/test_windows.py.
pytestmark = [pytest.mark.needs_ranks(2), pytest.mark.cpu_only]

# Of an ordinary step, of the first one, and how late a rank is in it.
TIMEOUT_S, FIRST_S, LATE_S = 0.2, 120.0, 0.5
TOPK = torch.tensor([[0, 1]])


def plan_of(engine: Engine) -> Callable[[], object]:
    return lambda: engine.plan(TOPK)


def low_latency_of(engine: Engine) -> Callable[[], object]:
    calls = create_low_latency(engine, max_tokens=1, hidden=8, top_k=2)
    x, w = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 2)

    def pair() -> None:
        calls.combine(calls.dispatch(x, TOPK, w).rows)

    return pair


@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "torch"])
@pytest.mark.parametrize("make", [plan_of, low_latency_of])
def test_a_rank_may_be_late_in_the_first_step(
    ctx: RankContext, make: Callable[[Engine], Callable[[], object]], shares_memory: bool
) -> None:
    """Rank 1 is, in those of two engines; after them rank 0 gives up."""
    config = EpConfig(engine="reference", timeout_s=TIMEOUT_S, first_timeout_s=FIRST_S)
    with own_group(ctx, NCCLEP_HOST_EXCHANGE=str(int(shares_memory))) as process_group:
        group = EpGroup.of(process_group)
        for _ in range(2):
            call = make(create_engine(process_group, 2 * ctx.num_ranks, config))
            group.check()  # of a model that has not begun
            dist.barrier(ctx.group)
            if ctx.rank == 1:
                time.sleep(LATE_S)  # longer than rank 0 waits, were this not the first step
            call()
            dist.barrier(ctx.group)
            group.check()
        if ctx.rank == 0:
            with pytest.raises(PeerError, match=rf"\(deadline {TIMEOUT_S:g} s\)"):
                call()
        dist.barrier(ctx.group)
