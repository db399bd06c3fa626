"""Step 2: every engine puts every row and weight where the oracle says, exactly."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.engines import create_engine
from megatron_ncclep.testing.cases import Case, contract_cases
from megatron_ncclep.testing.compare import assert_dispatched, assert_same_bits
from megatron_ncclep.testing.launcher import RankContext, RankPool
from megatron_ncclep.testing.oracle import oracle_dispatch, oracle_plan

CASES = [
    pytest.param(case, id=f"{ranks}ranks-{case}")
    for ranks in (1, 2, 3, 4)
    for case in contract_cases(ranks)
]


def dispatch_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = case.on(ctx.device)
    engine = create_engine(ctx.group, case.num_experts, case.config(engine_name))
    plan = engine.plan(case.topk_idx(ctx.rank))
    x = case.rows(ctx.rank, case.tokens[ctx.rank], salt=2)
    rows, row_w = engine.dispatch(plan, x, case.weights(ctx.rank))
    assert row_w is not None
    rows_alone, none = engine.dispatch(plan, x)
    assert none is None
    return rows, row_w, rows_alone


@pytest.mark.parametrize("case", CASES)
def test_rows_and_weights_are_the_oracles(pool: RankPool, engine_name: str, case: Case) -> None:
    ranks = range(case.num_ranks)
    oracle = oracle_plan(
        [case.topk_idx(r) for r in ranks], case.num_experts, case.alignment, case.max_recv_rows
    )
    x = [case.rows(r, case.tokens[r], salt=2) for r in ranks]
    w = [case.weights(r) for r in ranks]
    expected, expected_w = oracle_dispatch(oracle, x, w)
    results = pool.run(dispatch_on_rank, case, engine_name, ranks=case.num_ranks)
    for rank, (rows, row_w, rows_alone) in enumerate(results):
        assert_dispatched(oracle, x, w, rank, rows, row_w)
        assert_same_bits(rows, expected[rank], f"rows of rank {rank}")
        assert_same_bits(row_w, expected_w[rank], f"weights of rank {rank}")
        assert_same_bits(rows_alone, expected[rank], f"rows of rank {rank}, without weights")
