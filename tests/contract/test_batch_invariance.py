"""A token's output and gradients depend on the token, its experts and the layout, not on the batch.

Each rank has a few watched tokens, whose rows, experts, weights and gradients are the same in every
batch.  Everything else changes from batch to batch: the number of other tokens on the rank, the
positions of the watched tokens among them, and the tokens of the other ranks, which may have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

import pytest
import torch
from compare import assert_same_bits
from rank_pool import RankContext, RankPool
from run_case import fitted, opened, run_case

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch

WATCHED, BATCHES = 4, 9
MOST = 60  # other tokens of a rank, at most
FIVE = (WATCHED + MOST,) * 5
CASES = [
    Case("bf16", FIVE[:4], 16, 6, hidden=64, dtype=torch.bfloat16),
    # Sums of three or more rows, which round in fp32 in any order.
    Case("fp32-aligned", FIVE[:4], 16, 11, alignment=16, dropped=0.1),
    Case("static", FIVE[:4], 16, 6, dtype=torch.bfloat16, alignment=16, max_recv_rows=2048),
]


class Tokens(NamedTuple):
    """Some tokens of a rank: their inputs to forward and backward."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    w: torch.Tensor
    grad: torch.Tensor


def tokens(case: Case, rank: int, number: int, seed: int) -> Tokens:
    """Make `number` tokens for a rank; another seed gives other tokens."""
    made = dataclasses.replace(case, tokens=(number,) * case.num_ranks, seed=seed)
    rows = (made.rows(rank, number, salt=salt) for salt in (2, 7))
    x, grad = (((r - rank - 1.5) * 3).to(case.dtype) for r in rows)
    return Tokens(x, made.topk_idx(rank), made.weights(rank), grad)


def batches(case: Case, rank: int, most: int) -> Iterator[tuple[Tokens, torch.Tensor | None]]:
    """The batches of a rank, each with the positions of its watched tokens, or None without them.

    In the first batches, one rank after the other has its watched tokens while the others have no
    tokens.  Later batches have other tokens too, and in most of them a few experts get most rows.
    """
    watched = tokens(case, rank, WATCHED, seed=0)
    for batch in range(case.num_ranks + BATCHES):
        has_company = batch >= case.num_ranks
        has_watched = (rank == batch) or (has_company and (rank + batch) % 4 != 0)
        number = (0, most, 1, most // 3)[(batch + rank) % 4] if has_company else 0
        crowded = dataclasses.replace(case, skew=float(batch % 3))
        company = tokens(crowded, rank, number, seed=batch + 1)
        together = company
        if has_watched:
            together = Tokens(*(torch.cat(pair) for pair in zip(watched, company, strict=True)))
        order = torch.randperm(len(together.x), generator=torch.Generator().manual_seed(batch))
        places = order.argsort()[:WATCHED].to(case.device) if has_watched else None
        yield Tokens(*(t[order.to(case.device)] for t in together)), places


def factors(num_experts: int, case: Case) -> torch.Tensor:
    """The factor of each expert for its rows: every product rounds independently of the others."""
    return torch.linspace(-1.5, 2, num_experts, device=case.device).to(case.dtype)


def steps(engine: Engine, case: Case, rank: int, batch: Tokens) -> list[torch.Tensor]:
    """Run a step; return all tokens' outputs and the gradients of their rows and weights."""
    plan = engine.plan(batch.topk_idx)
    x, w = batch.x.clone().requires_grad_(), batch.w.clone().requires_grad_()
    rows, row_w = dispatch(engine, plan, x, w)
    mine = factors(case.num_experts, case).chunk(case.num_ranks)[rank]
    factor = mine.repeat_interleave(plan.tokens_per_expert.to(case.device))
    factor = torch.nn.functional.pad(factor, (0, plan.num_rows - len(factor)))
    y = rows * factor[:, None] * row_w.detach()[:, None].to(case.dtype)
    out = combine(engine, plan, y)
    torch.autograd.backward([out, row_w], [batch.grad, factor.to(row_w.dtype)])
    return [out.detach(), x.grad, w.grad]


def low_latency_steps(
    calls: LowLatency, case: Case, rank: int, batch: Tokens, is_packed: bool
) -> list[torch.Tensor]:
    """Run a step; return all tokens' outputs."""
    received = calls.dispatch(batch.x, batch.topk_idx, batch.w)
    blocks = received.packed_by_expert() if is_packed else received.by_expert()
    factor = factors(case.num_experts, case).chunk(case.num_ranks)[rank]
    if is_packed:
        factor = factor.repeat_interleave(blocks.counts.to(case.device))
        factor = torch.nn.functional.pad(factor, (0, len(blocks.rows) - len(factor)))
    factor = factor.view(-1, *[1] * (blocks.rows.dim() - 1))
    return [calls.combine(blocks.rows * factor, blocks.rows_of)]


def watch(ctx: RankContext, case: Case, engine_name: str, low_latency: bool = False) -> int:
    """Compare all batches of this rank, and count those that had the watched tokens.

    In low-latency mode the experts' blocks are packed or have gaps, in turn.
    """
    seen: list[list[torch.Tensor]] = []
    most = 20 if low_latency else MOST
    with opened(ctx, case, engine_name) as (case, engine), ExitStack() as stack:
        if low_latency:
            sizes = {"max_tokens": WATCHED + most, "hidden": case.hidden, "top_k": case.top_k}
            made = create_low_latency(engine, **sizes, dtype=case.dtype)
            calls = stack.enter_context(closing(made))
        else:
            # In static mode over several nodes the largest batch must come first.
            steps(engine, case, ctx.rank, tokens(case, ctx.rank, WATCHED + MOST, seed=0))
        for number, (batch, places) in enumerate(batches(case, ctx.rank, most)):
            if low_latency:
                results = low_latency_steps(calls, case, ctx.rank, batch, number % 2 == 1)
            else:
                results = steps(engine, case, ctx.rank, batch)
            if places is not None:
                seen.append([result[places].clone() for result in results])
    for number, others in enumerate(seen):
        for what, mine, first in zip(("out", "x.grad", "w.grad"), others, seen[0], strict=False):
            assert_same_bits(mine, first, f"rank {ctx.rank}, {what}, occurrence {number}")
    assert all(result.any() for result in seen[0])
    return len(seen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_company_changes_no_bit(pool: RankPool, engine_name: str, case: Case) -> None:
    for times in run_case(pool, watch, fitted(case, pool, engine_name), engine_name) or []:
        assert times > BATCHES // 2


@pytest.mark.needs_caps(test=lambda caps: caps.low_latency_tokens > 0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_company_changes_no_bit_in_low_latency_mode(
    pool: RankPool, engine_name: str, dtype: torch.dtype
) -> None:
    ranks = min(4, pool.size)
    case = Case("low-latency", FIVE[:ranks], 4 * ranks, 4, 64, dtype)
    for times in pool.run(watch, case, engine_name, True, ranks=ranks):
        assert times > BATCHES // 2
