"""Step 3: every engine adds rows up in the contract's order, to the last bit."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import EVERY_PART_ROUNDED
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.reference import ReferenceEngine
from megatron_ncclep.testing.cases import Case, contract_cases
from megatron_ncclep.testing.compare import assert_same_bits
from megatron_ncclep.testing.launcher import RankContext, RankPool
from megatron_ncclep.testing.oracle import OraclePlan, oracle_combine, oracle_plan

CASES = [
    pytest.param(case, id=f"{ranks}ranks-{case}")
    for ranks in (1, 2, 3, 4)
    for case in contract_cases(ranks)
]
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = case.on(ctx.device)
    engine = create_engine(ctx.group, case.num_experts, case.config(engine_name))
    plan = engine.plan(case.topk_idx(ctx.rank))
    y, values = row_values(case, ctx.rank, plan.num_rows)
    out, home = engine.combine(plan, y, values)
    assert home is not None
    out_alone, none = engine.combine(plan, y)
    assert none is None
    return out, home, out_alone


def expected_sums(case: Case) -> tuple[OraclePlan, list[torch.Tensor], list[torch.Tensor]]:
    ranks = range(case.num_ranks)
    oracle = oracle_plan(
        [case.topk_idx(r) for r in ranks], case.num_experts, case.alignment, case.max_recv_rows
    )
    values = [row_values(case, r, len(oracle.slots[r])) for r in ranks]
    out, home = oracle_combine(oracle, [y for y, _ in values], [w for _, w in values])
    return oracle, out, home


@pytest.mark.parametrize("case", CASES)
def test_sums_and_values_are_the_oracles(pool: RankPool, engine_name: str, case: Case) -> None:
    _, out, home = expected_sums(case)
    results = pool.run(combine_on_rank, case, engine_name, ranks=case.num_ranks)
    for rank, (actual, actual_home, alone) in enumerate(results):
        assert_same_bits(actual, out[rank], f"output of rank {rank}")
        assert_same_bits(actual_home, home[rank], f"values of rank {rank}")
        assert_same_bits(alone, out[rank], f"output of rank {rank}, without values")


def rounded_on_rank(ctx: RankContext, case: Case) -> torch.Tensor:
    case = case.on(ctx.device)
    engine = ReferenceEngine(
        EpGroup.of(ctx.group), case.num_experts, case.config(), EVERY_PART_ROUNDED
    )
    plan = engine.plan(case.topk_idx(ctx.rank))
    return engine.combine(plan, row_values(case, ctx.rank, plan.num_rows)[0])[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_reference_can_round_every_part(pool: RankPool, dtype: torch.dtype) -> None:
    """The other reduction, which an engine may declare; in fp32 there is nothing to round."""
    case = Case("rounded", (25, 12, 0, 31), 16, 8, hidden=32, dtype=dtype)
    oracle, unrounded, _ = expected_sums(case)
    y, w = zip(*(row_values(case, r, len(oracle.slots[r])) for r in range(4)), strict=True)
    out, _ = oracle_combine(oracle, list(y), list(w), round_home=True)
    for rank, actual in enumerate(pool.run(rounded_on_rank, case)):
        assert_same_bits(actual, out[rank], f"output of rank {rank}")
    differs = any(not torch.equal(a, b) for a, b in zip(out, unrounded, strict=True))
    assert differs == (dtype != torch.float32)


def nan_padding_on_rank(ctx: RankContext, case: Case, engine_name: str) -> torch.Tensor:
    case = case.on(ctx.device)
    engine = create_engine(ctx.group, case.num_experts, case.config(engine_name))
    plan = engine.plan(case.topk_idx(ctx.rank))
    y, values = row_values(case, ctx.rank, plan.num_rows)
    is_padding = engine.dispatch(plan, y.new_ones(plan.num_tokens, 1))[0][:, 0] == 0
    assert bool(is_padding.any())
    return engine.combine(plan, y.masked_fill(is_padding[:, None], float("nan")), values)[0]


def test_padding_rows_are_not_read(pool: RankPool, engine_name: str) -> None:
    case = Case("nan-in-padding", (11, 6, 0), 12, 3, alignment=16)
    _, out, _ = expected_sums(case)
    for rank, actual in enumerate(pool.run(nan_padding_on_rank, case, engine_name, ranks=3)):
        assert_same_bits(actual, out[rank], f"output of rank {rank}")
