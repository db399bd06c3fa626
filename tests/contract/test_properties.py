"""Random routings: whatever the tokens, experts and masks, all three steps are the oracle's."""

from __future__ import annotations

import torch
from compare import assert_dispatched, assert_same_bits
from contract_cases import for_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import oracle_combine
from run_case import caps_of, opened, oracle_of, ranks_on_node, rounds_source_part, run_case

from megatron_ncclep.ranks.pool import RankContext, RankPool
from megatron_ncclep.testing.cases import Case


@st.composite
def cases(draw: st.DrawFn, rank_counts: list[int]) -> Case:
    ranks = draw(st.sampled_from(rank_counts))
    num_experts = ranks * draw(st.integers(1, 6))
    alignment = draw(st.sampled_from([1, 1, 16, 32]))
    static = draw(st.none() | st.integers(1, 6))
    return Case(
        "random",
        tuple(draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks))),
        num_experts,
        top_k=draw(st.integers(1, min(num_experts, 8))),
        hidden=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])),
        alignment=alignment,
        max_recv_rows=None if static is None else 16 * alignment * static,
        skew=draw(st.sampled_from([0.0, 0.5, 100.0])),
        dropped=draw(st.sampled_from([0.0, 0.2, 0.9])),
        seed=draw(st.integers(0, 1000)),
    )


def all_steps_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[torch.Tensor]:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, plan.num_tokens, salt=2)
        rows, row_w = engine.dispatch(plan, x, case.weights(ctx.rank))
        out, topk_w = engine.combine(plan, case.rows(ctx.rank, plan.num_rows, salt=5), row_w)
        return [rows, row_w, out, topk_w]


def assert_steps(case: Case, engine_name: str, results: list[list[torch.Tensor]]) -> None:
    """Compare what `all_steps_on_rank` gave with the oracle."""
    ranks = range(case.num_ranks)
    oracle = oracle_of(case, engine_name)
    x = [case.rows(r, case.tokens[r], salt=2) for r in ranks]
    w = [case.weights(r) for r in ranks]
    for rank, (rows, row_w, _, _) in enumerate(results):
        assert_dispatched(oracle, x, w, rank, rows, row_w)
    y = [case.rows(r, len(oracle.slots[r]), salt=5) for r in ranks]
    out, topk_w = oracle_combine(
        oracle,
        y,
        [result[1] for result in results],
        rounds_source_part(engine_name),
        ranks_on_node(engine_name, case.num_ranks),
    )
    for rank, result in enumerate(results):
        assert_same_bits(result[2], out[rank], f"{case}: output of rank {rank}")
        assert_same_bits(result[3], topk_w[rank], f"{case}: weights back at rank {rank}")


@settings(
    max_examples=120,
    deadline=None,  # no timing assertions
    derandomize=True,  # the same cases on every node; a failing one can be run again
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_every_step_is_the_oracles(
    pool: RankPool, engine_name: str, rank_counts: list[int], data: st.DataObject
) -> None:
    case = for_engine(data.draw(cases(rank_counts)), caps_of(engine_name))
    results = run_case(pool, all_steps_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    assert_steps(case, engine_name, results)
