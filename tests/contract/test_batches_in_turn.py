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
from rank_pool import RankContext, RankPool
from run_case import assert_steps, calls, fitted, opened, run_case

from megatron_ncclep.benchmark.cases import Case

# Each time the next call of this batch: plan, dispatch, combine, and the last two again.
ORDER = (0, 0, 1, 0, 1, 2, 2, 1, 2, 0, 3, 0, 3, 3, 1, 1)
COMBINED = (0, 1, 2, 0, 3, 1)


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


def in_turn_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[list[torch.Tensor]]:
    """What all `calls` gave, at each combine."""
    with opened(ctx, case, engine_name) as (_, engine):
        batches = [batch.on(ctx.device) for batch in batches_of(case, engine_name)]
        turns = [calls(engine, batch, ctx.rank) for batch in batches]
        return [found for number in ORDER if len(found := next(turns[number])) == 4]


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
    for number, result in zip(COMBINED, zip(*results, strict=True), strict=True):
        assert_steps(batches[number], engine_name, list(result))
