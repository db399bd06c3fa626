"""Step 2: every engine puts every row and weight where the oracle says, exactly."""

from __future__ import annotations

import torch
from compare import assert_dispatched, assert_same_bits
from oracle import oracle_dispatch
from rank_pool import RankContext, RankPool
from run_case import opened, oracle_of, run_case

from benchmarks.cases import Case


def dispatch_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[torch.Tensor | None, ...]:
    """Rows and weights, and once more without weights."""
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, case.tokens[ctx.rank], salt=2)
        return *engine.dispatch(plan, x, case.weights(ctx.rank)), *engine.dispatch(plan, x)


def test_rows_and_weights_are_the_oracles(
    pool: RankPool, engine_name: str, contract_case: Case
) -> None:
    case = contract_case
    results = run_case(pool, dispatch_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    ranks = range(case.num_ranks)
    oracle = oracle_of(case, engine_name)
    x = [case.rows(r, case.tokens[r], salt=2) for r in ranks]
    w = [case.weights(r) for r in ranks]
    expected, expected_w = oracle_dispatch(oracle, x, w)
    for rank, (rows, row_w, rows_alone, none) in enumerate(results):
        assert none is None
        assert_dispatched(oracle, x, w, rank, rows, row_w)
        assert_same_bits(rows, expected[rank], f"rows of rank {rank}")
        assert_same_bits(row_w, expected_w[rank], f"weights of rank {rank}")
        assert_same_bits(rows_alone, expected[rank], f"rows of rank {rank}, without weights")
