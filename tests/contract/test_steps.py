"""Plan, dispatch and combine of every engine: the oracle's slots, rows and sums, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from compare import assert_dispatched, assert_same_bits
from contract_cases import PAYLOAD_LIMITS, caps_of
from oracle import oracle_combine, oracle_dispatch
from rank_pool import RankContext, RankPool
from run_case import Sums, fitted, opened, oracle_of, run_case

from megatron_ncclep.benchmark.cases import Case, refusal
from megatron_ncclep.engines.engine import RoutePlan
from megatron_ncclep.engines.nccl_ep.staging import Route

WEIGHT_DTYPE = {torch.float64: torch.float64}


def row_values(case: Case, rank: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert outputs whose sums round differently in every order, and a value for each row."""
    y = case.rows(rank, num_rows, salt=5) * 3
    row = torch.arange(num_rows, device=y.device)
    sign = torch.where(row % 3 == 1, -1, 1).to(y.dtype)
    values = row + 1000.0 * (rank + 1)
    return y * sign[:, None], values.to(WEIGHT_DTYPE.get(case.dtype, torch.float32))


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
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """All steps on one engine: opening one takes longer than they do.

    Returns:
        the plan's numbers; rows and weights, and both once more without weights; sums and values,
        and both once more without values.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, case.tokens[ctx.rank], salt=2)
        y, values = row_values(case, ctx.rank, plan.num_rows)
        dispatched = [*engine.dispatch(plan, x, case.weights(ctx.rank)), *engine.dispatch(plan, x)]
        combined = [*engine.combine(plan, y, values), *engine.combine(plan, y)]
        if case.max_recv_rows is not None:
            loose = engine.plan(case.topk_idx(ctx.rank), zero_unused=False)
            rows, row_w = engine.dispatch(loose, x, case.weights(ctx.rank))
            used = int(loose.tokens_per_expert.sum())
            assert_same_bits(rows[:used], dispatched[0][:used], "rows, unused ones left out")
            assert_same_bits(row_w, dispatched[1], "weights, those of unused rows too")
        return numbers_of(plan), dispatched, combined


def combine_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        engine.combine(plan, *row_values(case, ctx.rank, plan.num_rows))


def expected_sums(case: Case, engine_name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What combine must give on each rank."""
    oracle = oracle_of(case, engine_name)
    values = [row_values(case, rank, len(slots)) for rank, slots in enumerate(oracle.slots)]
    return oracle_combine(
        oracle,
        [y for y, _ in values],
        [w for _, w in values],
        *Sums.of(engine_name, case.num_ranks),
    )


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


def assert_rows(case: Case, engine_name: str, results: list[list[Any]]) -> None:
    oracle = oracle_of(case, engine_name)
    x = [case.rows(r, case.tokens[r], salt=2) for r in range(case.num_ranks)]
    w = [case.weights(r) for r in range(case.num_ranks)]
    expected, expected_w = oracle_dispatch(oracle, x, w)
    for rank, (rows, row_w, rows_alone, none) in enumerate(results):
        assert none is None
        assert_dispatched(oracle, x, w, rank, rows, row_w)
        assert_same_bits(rows, expected[rank], f"rows of rank {rank}")
        assert_same_bits(row_w, expected_w[rank], f"weights of rank {rank}")
        assert_same_bits(rows_alone, expected[rank], f"rows of rank {rank}, without weights")


def assert_sums(case: Case, engine_name: str, results: list[list[Any]]) -> None:
    out, topk_w = expected_sums(case, engine_name)
    for rank, (actual, actual_w, alone, none) in enumerate(results):
        assert none is None
        assert_same_bits(actual, out[rank], f"output of rank {rank}")
        assert_same_bits(actual_w, topk_w[rank], f"values of rank {rank}")
        assert_same_bits(alone, out[rank], f"output of rank {rank}, without values")


def test_all_steps_are_the_oracles(pool: RankPool, engine_name: str, contract_case: Case) -> None:
    case = contract_case
    results = run_case(pool, steps_on_rank, case, engine_name)
    if results is None:  # refused, as it must be; a limit of rows keeps nobody from planning
        if refusal(case, caps_of(engine_name)) in PAYLOAD_LIMITS:
            plans = run_case(pool, plan_on_rank, case, engine_name, plans_only=True)
            assert plans is not None
            assert_plans(case, engine_name, plans)
            run_case(pool, combine_on_rank, case, engine_name)
        return
    plans, dispatched, combined = map(list, zip(*results, strict=True))
    assert_plans(case, engine_name, plans)
    assert_rows(case, engine_name, dispatched)
    assert_sums(case, engine_name, combined)


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


def nan_padding_on_rank(ctx: RankContext, case: Case, engine_name: str) -> torch.Tensor:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        y, values = row_values(case, ctx.rank, plan.num_rows)
        is_padding = engine.dispatch(plan, y.new_ones(plan.num_tokens, case.hidden))[0][:, 0] == 0
        assert bool(is_padding.any())
        return engine.combine(plan, y.masked_fill(is_padding[:, None], float("nan")), values)[0]


def test_padding_rows_are_not_read(pool: RankPool, engine_name: str) -> None:
    case = fitted(Case("nan-in-padding", (11, 6, 0), 12, 3, alignment=16), pool, engine_name)
    results = run_case(pool, nan_padding_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    out, _ = expected_sums(case, engine_name)
    for rank, actual in enumerate(results):
        assert_same_bits(actual, out[rank], f"output of rank {rank}")
