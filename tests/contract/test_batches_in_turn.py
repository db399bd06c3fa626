"""Batches of several sizes through one engine, a call of one between two of another.

The large one comes between the small one's plan and its other calls, so whatever an engine keeps
for batches grows while a plan is alive, and small ones go through what is large.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from contract_cases import caps_of, for_engine
from named_rows import assert_both_steps
from rank_pool import RankContext, RankPool
from run_case import assert_steps, fitted, opened, run_case

from megatron_ncclep.benchmark.cases import Case

ORDER = (
    "plan 0, dispatch 0, plan 1, combine 0, dispatch 1, plan 2, dispatch 2, combine 1, combine 2, "
    "dispatch 0, plan 3, combine 0, dispatch 3, combine 3, dispatch 1, combine 1"
)


def batches_of(case: Case, engine_name: str) -> list[Case]:
    """The case; a large one; one whose assignments are all on rank 0, whose row is longest; and one
    as small as the first of another routing, of which a rank has no tokens."""
    R = case.num_ranks
    on_rank = case.num_experts // R
    large = {"tokens": tuple(300 - 7 * r for r in range(R)), "top_k": min(3, case.num_experts)}
    crowd = {"tokens": (70,) * R, "top_k": min(2, on_rank), "skew": 100.0, "hidden": 48}
    last = {"tokens": (*(2,) * (R - 1), 0 if R > 1 else 2), "seed": 9}
    changes: tuple[dict[str, Any], ...] = ({}, {**large, "hidden": 32}, crowd, last)
    batches = [dataclasses.replace(case, **change) for change in changes]
    return [for_engine(batch, caps_of(engine_name)) for batch in batches]


def in_turn_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> list[tuple[int, list[torch.Tensor]]]:
    """Each combine: the number of its batch, and what all_steps_on_rank returns."""
    batches = [batch.on(ctx.device) for batch in batches_of(case, engine_name)]
    plans, received, results = {}, {}, []
    with opened(ctx, case, engine_name) as (_, engine):
        for step in ORDER.split(", "):
            name, number = step.split()[0], int(step.split()[1])
            batch = batches[number]
            if name == "plan":
                plans[number] = engine.plan(batch.topk_idx(ctx.rank))
            plan = plans[number]
            if name == "dispatch":
                x = batch.rows(ctx.rank, plan.num_tokens, salt=2)
                received[number] = engine.dispatch(plan, x, batch.weights(ctx.rank))
            if name == "combine":
                rows, row_w = received[number]
                y = batch.rows(ctx.rank, plan.num_rows, salt=5)
                out, topk_w = engine.combine(plan, y, row_w)
                assert row_w is not None
                assert topk_w is not None
                results.append((number, [rows, row_w, out, topk_w]))
    return results


@pytest.mark.parametrize("max_recv_rows", [None, 80], ids=["exact", "static"])
def test_every_batch_is_the_oracles(
    pool: RankPool, engine_name: str, max_recv_rows: int | None
) -> None:
    """In static mode the large batch drops rows, and the small ones leave most of theirs empty."""
    R = pool.size
    tokens = tuple(3 + r for r in range(R))
    case = Case("in-turn", tokens, 4 * R, max_recv_rows=max_recv_rows)
    case = fitted(case, pool, engine_name)
    results = run_case(pool, in_turn_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    batches = batches_of(case, engine_name)
    combines = [[number for number, _ in mine] for mine in results]
    assert combines == [[0, 1, 2, 0, 3, 1]] * case.num_ranks
    for each in range(len(combines[0])):
        assert_steps(batches[combines[0][each]], engine_name, [mine[each][1] for mine in results])


def named_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    with opened(ctx, case, engine_name) as (case, engine):
        for each in (case, dataclasses.replace(case, skew=100.0)):
            assert_both_steps(engine, ctx, each.topk_idx(ctx.rank), case.hidden)


def test_rows_and_weights_are_those_they_name(pool: RankPool, engine_name: str) -> None:
    """As tests/gpu/test_gpu_network.py has large batches, which go in rounds."""
    R = pool.size
    tokens = tuple(400 - r for r in range(R))
    case = Case("named", tokens, 4 * R, dtype=torch.bfloat16, fixed_payload=True)
    run_case(pool, named_on_rank, fitted(case, pool, engine_name), engine_name)
