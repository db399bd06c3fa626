"""Step 3: every engine adds rows up in the contract's order, to the last bit."""

from __future__ import annotations

import torch
from compare import assert_same_bits
from oracle import oracle_combine
from rank_pool import RankContext, RankPool
from run_case import Sums, fitted, opened, oracle_of, run_case

from benchmarks.cases import Case

WEIGHT_DTYPE = {torch.float64: torch.float64}


def row_values(case: Case, rank: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert outputs whose sums round differently in every order, and a value for each row."""
    y = case.rows(rank, num_rows, salt=5) * 3
    row = torch.arange(num_rows, device=y.device)
    sign = torch.where(row % 3 == 1, -1, 1).to(y.dtype)
    values = row + 1000.0 * (rank + 1)
    return y * sign[:, None], values.to(WEIGHT_DTYPE.get(case.dtype, torch.float32))


def combine_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[torch.Tensor | None, ...]:
    """Sums and values, and once more without values."""
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        y, values = row_values(case, ctx.rank, plan.num_rows)
        return *engine.combine(plan, y, values), *engine.combine(plan, y)


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


def test_sums_and_values_are_the_oracles(
    pool: RankPool, engine_name: str, contract_case: Case
) -> None:
    results = run_case(pool, combine_on_rank, contract_case, engine_name)
    if results is None:
        return  # refused, as it must be
    out, topk_w = expected_sums(contract_case, engine_name)
    for rank, (actual, actual_w, alone, none) in enumerate(results):
        assert none is None
        assert_same_bits(actual, out[rank], f"output of rank {rank}")
        assert_same_bits(actual_w, topk_w[rank], f"values of rank {rank}")
        assert_same_bits(alone, out[rank], f"output of rank {rank}, without values")


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
