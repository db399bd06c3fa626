"""Plan, dispatch and combine of every engine: the oracle's slots, rows and sums, bit for bit."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from compare import assert_same_bits
from contract_cases import PAYLOAD_LIMITS, caps_of
from rank_pool import RankContext, RankPool
from run_case import assert_steps, calls, fitted, opened, oracle_of, run_case

from megatron_ncclep.benchmark.cases import Case, refusal
from megatron_ncclep.engines.engine import RoutePlan
from megatron_ncclep.engines.nccl_ep.staging import Route


def numbers_of(plan: RoutePlan) -> dict[str, Any]:
    """What a plan says of the rows that this rank receives."""
    return {
        "num_rows": plan.num_rows,
        "routed": plan.routed_per_expert.tolist(),
        "padded": plan.tokens_per_expert.tolist(),
        "padded_on_host": plan.tokens_per_expert_on_host().tolist(),
        "num_dropped": int(plan.num_dropped),
        "dtypes": {plan.tokens_per_expert.dtype, plan.routed_per_expert.dtype},
    }


def plan_on_rank(ctx: RankContext, case: Case, engine_name: str) -> dict[str, Any]:
    with opened(ctx, case, engine_name) as (case, engine):
        return numbers_of(engine.plan(case.topk_idx(ctx.rank)))


def steps_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The plan's numbers, and the results of all calls, with which others are compared here.

    All on one engine: opening one takes longer than they do.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x, w = case.rows(ctx.rank, plan.num_tokens, salt=2), case.weights(ctx.rank)
        y = case.rows(ctx.rank, plan.num_rows, salt=5)
        _, results = islice(calls(engine, case, ctx.rank, plan), 2)
        rows, row_w, out, topk_w = results
        for what, (alone, none), both in (
            ("rows", engine.dispatch(plan, x), rows),
            ("output", engine.combine(plan, y), out),
        ):
            assert none is None
            assert_same_bits(alone, both, f"{what} without weights")
        _, doubled = engine.combine(plan, y, 2 * row_w)
        assert_same_bits(doubled, 2 * topk_w, "weights other than those dispatched")
        if case.max_recv_rows is not None:
            loose = engine.plan(case.topk_idx(ctx.rank), zero_unused=False)
            loose_rows, loose_w = engine.dispatch(loose, x, w)
            used = int(loose.tokens_per_expert.sum())
            assert_same_bits(loose_rows[:used], rows[:used], "rows, unused ones left out")
            assert_same_bits(loose_w, row_w, "weights, those of unused rows too")
        return numbers_of(plan), results


def combine_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        engine.combine(plan, case.rows(ctx.rank, plan.num_rows, salt=5))


def assert_plans(case: Case, engine_name: str, plans: list[dict[str, Any]]) -> None:
    oracle = oracle_of(case, engine_name)
    for rank, plan in enumerate(plans):
        assert plan == {
            "num_rows": len(oracle.slots[rank]),
            "routed": oracle.routed[rank],
            "padded": oracle.padded[rank],
            "padded_on_host": oracle.padded[rank],
            "num_dropped": oracle.num_dropped[rank],
            "dtypes": {torch.int64},
        }, f"plan of rank {rank}"


def test_all_steps_are_the_oracles(pool: RankPool, engine_name: str, contract_case: Case) -> None:
    case = contract_case
    results = run_case(pool, steps_on_rank, case, engine_name)
    if results is not None:
        plans, steps = map(list, zip(*results, strict=True))
        assert_plans(case, engine_name, plans)
        assert_steps(case, engine_name, steps)
    elif refusal(case, caps_of(engine_name)) in PAYLOAD_LIMITS:  # which keep nobody from planning
        plans = run_case(pool, plan_on_rank, case, engine_name, plans_only=True) or []
        assert len(plans) == case.num_ranks
        assert_plans(case, engine_name, plans)
        run_case(pool, combine_on_rank, case, engine_name)


def bytes_held(plan: Any) -> int:
    """Of all tensors that a plan keeps alive, also through its own objects."""
    if isinstance(plan, torch.Tensor):
        return plan.nbytes
    own = vars(plan).values() if isinstance(plan, RoutePlan | Route) else ()
    return sum(map(bytes_held, own))


def plan_bytes_on_rank(ctx: RankContext, case: Case, engine_name: str) -> int:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        # An engine may find out only now how long the rows are.
        engine.dispatch(plan, case.rows(ctx.rank, plan.num_tokens, salt=2))
        return bytes_held(plan)


def test_a_plan_is_small(pool: RankPool, engine_name: str) -> None:
    case = Case("8192-tokens-top-8", (8192, 8192), num_experts=64, top_k=8)
    case = fitted(case, pool, engine_name)
    for nbytes in run_case(pool, plan_bytes_on_rank, case, engine_name) or []:
        assert nbytes <= (64 if engine_name == "nccl_ep" else 2) * 2**20


def nan_padding_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        y = case.rows(ctx.rank, plan.num_rows, salt=5)
        rows, _ = engine.dispatch(plan, y.new_ones(plan.num_tokens, case.hidden))
        is_padding = rows[:, :1] == 0
        assert bool(is_padding.any())
        with_nan, _ = engine.combine(plan, y.masked_fill(is_padding, float("nan")))
        assert_same_bits(with_nan, engine.combine(plan, y)[0], "output")


def test_padding_rows_are_not_read(pool: RankPool, engine_name: str) -> None:
    case = fitted(Case("nan-in-padding", (11, 6, 0), 12, 3, alignment=16), pool, engine_name)
    run_case(pool, nan_padding_on_rank, case, engine_name)
