"""The caller's stream: an engine reads inputs after what the stream held before, and writes before
what comes next.  On a CPU streams are dummies, so only these tests see a missing wait.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rank_pool import RankContext, RankPool
from run_case import assert_steps, fitted, opened, run_case

from megatron_ncclep.benchmark.cases import Case

# About 50 ms at 2 GHz, in which the host has long queued everything that follows.
SLOW_CYCLES = 100_000_000
NAN = float("nan")

Results = list[torch.Tensor]  # rows, their weights, sums, values at the source rank


def late(value: torch.Tensor, decoy: torch.Tensor) -> torch.Tensor:
    """`value`, but `decoy` until a slow kernel that is queued on the current stream has ended."""
    buffer = decoy.clone()
    torch.cuda._sleep(SLOW_CYCLES)
    return buffer.copy_(value)


def steps_on_a_stream(
    ctx: RankContext, case: Case, engine_name: str, second: Case
) -> tuple[Results, Results]:
    """Plan both cases, then dispatch and combine them in reverse order, all on a new stream.

    Each input is late, and spoilt as soon as the call that reads it has returned; each result is
    copied on the stream right after the call.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        cases = [case, second.on(ctx.device)]
        routes = [c.topk_idx(ctx.rank) for c in cases]
        xs = [c.rows(ctx.rank, c.tokens[ctx.rank], salt=2) for c in cases]
        ws = [c.weights(ctx.rank) for c in cases]
        torch.cuda.synchronize()
        results: dict[int, Results] = {0: [], 1: []}
        with torch.cuda.stream(torch.cuda.Stream()):
            plans = []
            for route in routes:
                topk_idx = late(route, decoy=route.flip(0))
                plans.append(engine.plan(topk_idx))
                topk_idx.fill_(-1)
            for i in (1, 0):
                x = late(xs[i], torch.full_like(xs[i], NAN))
                w = late(ws[i], torch.full_like(ws[i], NAN))
                rows, row_w = engine.dispatch(plans[i], x, w)
                results[i] += [rows.clone(), row_w.clone()]
                x.fill_(NAN)
                w.fill_(NAN)
            for i in (1, 0):
                rows = cases[i].rows(ctx.rank, plans[i].num_rows, salt=5)
                y = late(rows, torch.full_like(rows, NAN))
                v = late(results[i][1], torch.full_like(results[i][1], NAN))
                out, topk_w = engine.combine(plans[i], y, v)
                results[i] += [out.clone(), topk_w.clone()]
                y.fill_(NAN)
                v.fill_(NAN)
        torch.cuda.synchronize()
        return results[0], results[1]


def both_cases(pool: RankPool, engine_name: str, dtype: torch.dtype) -> tuple[Case, Case]:
    """Two micro-batches of one layer."""
    ranks = pool.size
    first = Case("first", (25, 12, 3, 31)[:ranks], 4 * ranks, 4, 64, dtype, dropped=0.1)
    first = fitted(first, pool, engine_name)
    tokens = (7, 40, 0, 16)[: first.num_ranks]
    return first, dataclasses.replace(first, name="second", tokens=tokens, top_k=2, seed=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inputs_of_a_slow_stream(pool: RankPool, engine_name: str, dtype: torch.dtype) -> None:
    first, second = both_cases(pool, engine_name, dtype)
    results = run_case(pool, steps_on_a_stream, first, engine_name, second)
    if results is None:
        return  # refused, as it must be
    for case, of_case in zip((first, second), zip(*results, strict=True), strict=True):
        assert_steps(case, engine_name, list(of_case))
