"""Step 1: every engine plans the oracle's slots and counts."""

from __future__ import annotations

import torch
from rank_pool import RankContext, RankPool
from run_case import fitted, opened, oracle_of, run_case

from benchmarks.cases import Case


def plan_on_rank(ctx: RankContext, case: Case, engine_name: str) -> dict:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        return {
            "num_rows": plan.num_rows,
            "routed": plan.routed_per_expert.tolist(),
            "padded": plan.tokens_per_expert.tolist(),
            "padded_on_host": plan.tokens_per_expert_on_host().tolist(),
            "num_dropped": int(plan.num_dropped),
            "dtypes": {plan.tokens_per_expert.dtype, plan.routed_per_expert.dtype},
        }


def test_counts_and_slots_are_the_oracles(
    pool: RankPool, engine_name: str, contract_case: Case
) -> None:
    plans = run_case(pool, plan_on_rank, contract_case, engine_name, plans_only=True)
    if plans is None:
        return  # refused, as it must be
    oracle = oracle_of(contract_case, engine_name)
    for rank, plan in enumerate(plans):
        assert plan["num_rows"] == len(oracle.slots[rank])
        assert plan["routed"] == oracle.routed[rank]
        assert plan["padded"] == oracle.padded[rank]
        assert plan["padded_on_host"] == oracle.padded[rank]
        assert plan["num_dropped"] == oracle.num_dropped[rank]
        assert plan["dtypes"] == {torch.int64}


def plan_bytes_on_rank(ctx: RankContext, case: Case, engine_name: str) -> int:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        # An engine may find out only now how long the rows are.
        engine.dispatch(plan, case.rows(ctx.rank, plan.num_tokens, salt=2))
        return plan.nbytes()


def test_a_plan_is_small(pool: RankPool, engine_name: str) -> None:
    case = Case("8192-tokens-top-8", (8192, 8192), num_experts=64, top_k=8)
    case = fitted(case, pool, engine_name)
    for nbytes in run_case(pool, plan_bytes_on_rank, case, engine_name) or []:
        assert nbytes <= (64 if engine_name == "nccl_ep" else 2) * 2**20
