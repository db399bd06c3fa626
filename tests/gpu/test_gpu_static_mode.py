"""Static mode on GPUs: a layer's hooks wait for nothing, and what was dropped is heard of late.

On a CPU no host waits for a device; tests/integration/dispatcher/test_token_dispatcher.py sees
there that nothing is read.  Only this test sees that nothing waits in another way, as a copy to
pageable memory does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_cases import config_of, rows_limit_of
from rank_pool import RankContext, RankPool
from run_case import fitted, oracle_of

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines import create_engine
from megatron_ncclep.errors import RowsDroppedError
from megatron_ncclep.ranks.group import EpGroup

NO_WAIT = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)

# The first assignments of each token are for rank 0's experts: with fewer rows some are dropped.
CASE = Case("static", (200,) * 4, 16, 4, hidden=64, alignment=16, skew=100.0)
LIMITS = [1024, "1.25x", "worst"]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises, as far as torch knows of it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Layer:
    """A dispatcher between a router and experts that stay the same."""

    def __init__(self, ctx: RankContext, case: Case, engine_name: str, **counts: bool) -> None:
        from megatron_ncclep.integration.dispatcher import NcclEpTokenDispatcher

        num_local = case.num_experts // ctx.num_ranks
        config = SimpleNamespace(
            num_moe_experts=case.num_experts,
            moe_router_topk=case.top_k,
            moe_pad_expert_input_to_capacity=False,
            ncclep=config_of(case, engine_name),
        )
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        groups: Any = SimpleNamespace(ep=ctx.group, expt_tp=alone, tp_ep=ctx.group)
        experts = list(range(ctx.rank * num_local, (ctx.rank + 1) * num_local))
        self.dispatcher = NcclEpTokenDispatcher(num_local, experts, config, groups, **counts)
        case = case.on(ctx.device)
        topk_idx, num_tokens = case.topk_idx(ctx.rank), case.tokens[ctx.rank]
        self.hidden = case.rows(ctx.rank, num_tokens, salt=2).requires_grad_()
        routing_map = torch.zeros(num_tokens, case.num_experts, device=ctx.device)
        self.routing_map = routing_map.scatter(1, topk_idx, 1).bool()
        self.probs = torch.rand_like(routing_map, requires_grad=True)

    def step(self) -> torch.Tensor:
        """All six hooks and their backward; returns the counts that experts get."""
        dispatcher = self.dispatcher
        x, w = dispatcher.dispatch_preprocess(self.hidden, self.routing_map, self.probs)
        rows, per_expert, row_w = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, w))
        y = dispatcher.combine_preprocess(rows * row_w[:, None])
        out = dispatcher.combine_postprocess(dispatcher.token_combine(y))
        out.sum().backward()
        return per_expert


def hooks_on_rank(
    ctx: RankContext, case: Case, engine_name: str, covers_all_rows: bool
) -> tuple[list[int], int]:
    """Steps in which waiting is an error; returns the counts and what was dropped in one step."""
    counts = {"counts_on_device": True, "counts_cover_all_rows": covers_all_rows}
    layer = Layer(ctx, case, engine_name, **counts)
    with closing(layer.dispatcher.engine):
        layer.step()  # windows grow, and kernels are loaded
        torch.cuda.synchronize()
        with waiting_is_an_error():
            for _ in range(3):
                per_expert = layer.step()
        assert per_expert.is_cuda
        assert layer.dispatcher.num_dropped is not None
        return per_expert.tolist(), int(layer.dispatcher.num_dropped) // 4


@NO_WAIT
@pytest.mark.parametrize("covers_all_rows", [False, True], ids=["", "counts cover all rows"])
@pytest.mark.parametrize("rows", LIMITS)
def test_no_hook_waits_for_the_gpu(
    pool: RankPool, engine_name: str, rows: int | str, covers_all_rows: bool
) -> None:
    case = fitted(dataclasses.replace(CASE, max_recv_rows=rows), pool, engine_name)
    limit = rows_limit_of(case)
    assert limit is not None
    results = pool.run(hooks_on_rank, case, engine_name, covers_all_rows, ranks=case.num_ranks)
    oracle = oracle_of(case)
    for rank, (per_expert, dropped) in enumerate(results):
        expected = oracle.padded[rank]
        if covers_all_rows:
            expected = [*expected[:-1], limit - sum(expected[:-1])]
        assert per_expert == expected
        assert dropped == oracle.num_dropped[rank]


def raised_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[str]:
    """What `check` raises after each of three replays; the second one drops rows."""
    group = EpGroup.of(ctx.group)
    config = dataclasses.replace(config_of(case, engine_name), on_overflow="raise")
    case = case.on(ctx.device)
    fits = dataclasses.replace(case, skew=0.0, dropped=0.99)
    assert not any(oracle_of(fits).num_dropped)
    said = []
    with closing(create_engine(ctx.group, case.num_experts, config)) as engine:
        topk_idx = fits.topk_idx(ctx.rank)
        engine.plan(topk_idx)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            plan = engine.plan(topk_idx)  # kept: replays write into it
            group.check()  # does nothing while a graph is captured
        for routing in (fits, case, fits):
            topk_idx.copy_(routing.topk_idx(ctx.rank))
            graph.replay()
            try:
                group.check()
                said.append("")
            except RowsDroppedError as error:
                said.append(str(error))
        del plan
    return said


@pytest.mark.needs_caps(test=lambda caps: caps.captures_static and "on_overflow" in caps.options)
@pytest.mark.parametrize("rows", [256, "1.25x"])
def test_every_rank_is_told_what_a_replay_dropped(
    pool: RankPool, engine_name: str, rows: int | str
) -> None:
    case = fitted(dataclasses.replace(CASE, max_recv_rows=rows), pool, engine_name)
    if not any(oracle_of(case).num_dropped):  # one rank has room for all of its own
        case = dataclasses.replace(case, max_recv_rows=256)
    needed = [sum(p) for p in oracle_of(dataclasses.replace(case, max_recv_rows=None)).padded]
    results = pool.run(raised_on_rank, case, engine_name, ranks=case.num_ranks)
    for first, raised, last in results:
        assert first == last == ""
        assert f"rank 0 needed {needed[0]} rows and had {rows_limit_of(case)}" in raised
        assert raised == results[0][1]
