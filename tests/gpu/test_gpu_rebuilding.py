"""Models that are built one after the other in one process give the GPU's memory back: windows,
communicators and what kernels keep.  Over one and the same group, on a CPU:
tests/integration/dispatcher/test_rebuilding.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_setup import build_layer, ep_config, initialize, make_config
from rank_pool import RankContext, RankPool
from rebuilding_case import SETTLED, growth, held
from timeouts import PatientPool

import megatron_ncclep
from megatron_ncclep import metrics
from megatron_ncclep.engines.engine import Engine

MODELS = 20
# Windows of at least 3 x 32 MiB: 16384 rows of 2 KiB, for dispatch, for combine and its own part.
SEQUENCE, BATCH, HIDDEN = 4096, 4, 1024
LEAST_WINDOWS = 3 * SEQUENCE * BATCH * HIDDEN * 2
# Bytes by which free memory may differ between two models that leave nothing behind.  The driver
# gives memory in pieces of 2 MiB, of which NCCL's communicators and CUDA's own pools need a few
# more or less each time; a window that stays, of any one model, is 32 MiB or more.
TOLERANCE = 24 * 2**20


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.needs_ranks(2))])
def few(request: pytest.FixtureRequest, backend: str) -> Iterator[RankPool]:
    """Processes in which nothing else runs."""
    pool = PatientPool(request.param, backend)
    yield pool
    pool.close()


def train(ctx: RankContext, engine_name: str) -> Engine:
    """A model's step; returns its engine."""
    rows = 2 * SEQUENCE * BATCH
    options = ep_config(engine_name, metrics_interval=1, max_recv_rows=rows)
    fields = {"hidden_size": HIDDEN, "ffn_hidden_size": 32, "ncclep": options}
    layer = build_layer(
        make_config("ncclep", torch.bfloat16, ctx.num_ranks, **fields), device="cuda"
    )
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    layer(x.requires_grad_())[0].sum().backward()
    metrics.after_step()
    megatron_ncclep.check()
    torch.cuda.synchronize()
    return layer.token_dispatcher.engine


def free_bytes() -> int:
    """What the driver has left when torch keeps nothing for later, on any rank.  Collective."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()  # ranks that share this GPU have given theirs back
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    dist.barrier()  # and no rank continues before all have looked
    return free


def models_on_rank(
    ctx: RankContext, engine_name: str
) -> tuple[list[int], dict[str, Any], list[tuple[int, int]]]:
    """Each model has process groups of its own.

    Returns:
        free memory before each model; what grew; of each model, bytes of windows before and after
        Megatron forgot its groups.
    """
    initialize(ctx.num_ranks, device="cuda")
    from megatron.core import parallel_state

    free, seen, windows = [], [], []
    for _ in range(MODELS + 1):
        initialize(ctx.num_ranks, device="cuda")  # destroys the groups that Megatron has forgotten
        free.append(free_bytes())
        seen.append(held())
        engine: Any = train(ctx, engine_name)
        had = engine._native.num_bytes
        parallel_state.destroy_model_parallel()
        windows.append((had, engine._native.num_bytes))
        del engine
    return free, growth(seen), windows


@pytest.mark.needs_caps(test=lambda caps: caps.name == "native")
def test_models_with_groups_of_their_own(few: RankPool, engine_name: str) -> None:
    for free, grown, windows in few.run(models_on_rank, engine_name, timeout=480):
        assert all(had >= LEAST_WINDOWS and has == 0 for had, has in windows), windows
        assert min(free[:SETTLED]) - free[-1] < TOLERANCE, free
        assert grown == {}
