"""Gradients; test_random.py has plans that are alive together, and dispatches from them again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from on_ranks import gathered
from rank_pool import RankContext, RankPool
from run_case import Tables, fitted, opened, run_case

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch

CASES = [
    Case("dropless", (9, 5, 12, 1), 8, 3, 5, torch.float64),
    Case("masked-and-padded", (7, 0, 4), 6, 2, 3, torch.float64, alignment=16, dropped=0.3),
    Case("overflow", (14, 9), 4, 2, 4, torch.float64, max_recv_rows=12),
    Case("one-rank", (8,), 4, 4, 3, torch.float64),
]


def compare_gradients_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    """Compare analytic and numeric derivatives of the sum of all ranks' losses.

    Along random directions, each through all inputs of all ranks: a gradient in another one's place
    changes the derivative.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        inputs = [case.rows(ctx.rank, plan.num_tokens, salt=2), case.weights(ctx.rank)]

        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            rows, row_w = dispatch(engine, plan, x, w)
            index = torch.arange(plan.num_rows, dtype=x.dtype, device=x.device)[:, None]
            experts = torch.sin(rows * (1 + 0.1 * index)) * row_w[:, None]
            out = combine(engine, plan, experts)
            return (out * torch.cos(out)).sum()

        x, w = (value.clone().requires_grad_() for value in inputs)
        loss(x, w).backward()
        generator, step = torch.Generator().manual_seed(ctx.rank), 1e-6
        for _ in range(8):
            way = [torch.rand(t.shape, generator=generator).to(t) - 0.5 for t in inputs]
            ends = [
                loss(*(t + sign * step * d for t, d in zip(inputs, way, strict=True)))
                for sign in (1, -1)
            ]
            analytic = sum((t.grad * d).sum() for t, d in zip((x, w), way, strict=True))
            both = torch.stack([analytic, (ends[0] - ends[1]) / (2 * step)])
            torch.distributed.all_reduce(both, group=ctx.group)
            # Central differences in fp64: error ~ step^2 + 1e-16 * |loss| / step ~ 1e-8.
            assert abs(both[0] - both[1]) < 1e-6 * (1 + abs(both[0])), both.tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_the_numeric_ones(pool: RankPool, engine_name: str, case: Case) -> None:
    """Differences need fp64; an engine without it refuses, and is held to the oracle below."""
    small = dataclasses.replace(
        case, tokens=tuple(t // 3 for t in case.tokens), hidden=2, fixed_payload=True
    )
    run_case(pool, compare_gradients_on_rank, fitted(small, pool, engine_name), engine_name)


def step(ctx: RankContext, engine: Any, case: Case) -> list[torch.Tensor]:
    """Forward and backward: the output, and the gradients of rows and weights."""
    plan = engine.plan(case.topk_idx(ctx.rank))
    x = case.rows(ctx.rank, case.tokens[ctx.rank], salt=2).requires_grad_()
    w = case.weights(ctx.rank).requires_grad_()
    rows, row_w = dispatch(engine, plan, x, w)
    out = combine(engine, plan, torch.tanh(rows) * row_w[:, None])
    out.backward(torch.cos(out.detach()))
    return [out.detach(), x.grad, w.grad]


class Oracle:
    """Stands in for an engine: computes with all ranks' tensors, in the order of that engine."""

    def __init__(self, ctx: RankContext, case: Case, engine_name: str) -> None:
        topk_idx = [case.topk_idx(rank) for rank in range(case.num_ranks)]
        self.ctx, options = ctx, (case.num_experts, case.alignment)
        self.tables = Tables(engine_name, topk_idx, *options)

    def every(self, mine: torch.Tensor | None) -> Any:
        """The tensor of each rank."""
        theirs = gathered(self.ctx, None if mine is None else mine.cpu())
        return None if mine is None else [t.to(mine.device) for t in theirs]

    def plan(self, topk_idx: torch.Tensor) -> Oracle:
        return self

    def dispatch(self, plan: Any, x: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        return self.tables.dispatch(self.ctx.rank, self.every(x), self.every(w))

    def combine(self, plan: Any, y: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        return self.tables.combine(self.ctx.rank, self.every(y), self.every(w))


def step_of_both(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What one step gives with the engine, and with the oracle."""
    with opened(ctx, case, engine_name) as (case, engine):
        mine = step(ctx, engine, case)
    return mine, step(ctx, Oracle(ctx, case, engine_name), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_are_the_oracles(pool: RankPool, engine_name: str, dtype: torch.dtype) -> None:
    """For an engine that does not move fp64; the numeric gradients are checked in fp64 only."""
    case = Case("gradients", (25, 12, 0, 31), 16, 4, dtype=dtype, alignment=16, dropped=0.2)
    results = run_case(pool, step_of_both, fitted(case, pool, engine_name), engine_name)
    for rank, (mine, expected) in enumerate(results or []):
        for what, a, b in zip(("out", "x.grad", "w.grad"), mine, expected, strict=True):
            assert_same_bits(a, b, f"rank {rank}, {what}")
