"""Step 1: every engine plans the oracle's slots and counts."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.engines import create_engine
from megatron_ncclep.testing.cases import Case, contract_cases
from megatron_ncclep.testing.launcher import RankContext, RankPool
from megatron_ncclep.testing.oracle import oracle_plan

CASES = [
    pytest.param(case, id=f"{ranks}ranks-{case}")
    for ranks in (1, 2, 3, 4)
    for case in contract_cases(ranks)
]


def plan_on_rank(ctx: RankContext, case: Case, engine_name: str, dtype: torch.dtype) -> dict:
    case = case.on(ctx.device)
    engine = create_engine(ctx.group, case.num_experts, case.config(engine_name))
    plan = engine.plan(case.topk_idx(ctx.rank).to(dtype))
    return {
        "num_rows": plan.num_rows,
        "routed": plan.routed_per_expert.tolist(),
        "padded": plan.tokens_per_expert.tolist(),
        "padded_on_host": plan.tokens_per_expert_on_host().tolist(),
        "num_dropped": int(plan.num_dropped),
        "dtypes": {plan.tokens_per_expert.dtype, plan.routed_per_expert.dtype},
        "nbytes": plan.nbytes(),
    }


@pytest.mark.parametrize("case", CASES)
def test_counts_and_slots_are_the_oracles(pool: RankPool, engine_name: str, case: Case) -> None:
    oracle = oracle_plan(
        [case.topk_idx(rank) for rank in range(case.num_ranks)],
        case.num_experts,
        case.alignment,
        case.max_recv_rows,
    )
    plans = pool.run(plan_on_rank, case, engine_name, torch.int64, ranks=case.num_ranks)
    for rank, plan in enumerate(plans):
        assert plan["num_rows"] == len(oracle.slots[rank])
        assert plan["routed"] == oracle.routed[rank]
        assert plan["padded"] == oracle.padded[rank]
        assert plan["padded_on_host"] == oracle.padded[rank]
        assert plan["num_dropped"] == oracle.num_dropped[rank]
        assert plan["dtypes"] == {torch.int64}


def test_int32_indices_plan_the_same(pool: RankPool, engine_name: str) -> None:
    case = Case("int32", (9, 4), dropped=0.2)
    wide = pool.run(plan_on_rank, case, engine_name, torch.int64, ranks=2)
    narrow = pool.run(plan_on_rank, case, engine_name, torch.int32, ranks=2)
    assert narrow == wide


def test_a_plan_is_small(pool: RankPool, engine_name: str) -> None:
    case = Case("8192-tokens-top-8", (8192, 8192), num_experts=64, top_k=8)
    for plan in pool.run(plan_on_rank, case, engine_name, torch.int64, ranks=2):
        assert plan["nbytes"] <= 2 * 2**20
