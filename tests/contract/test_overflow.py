"""Static mode: limits in words, what the source rank keeps, and reports of dropped rows."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch
from contract_cases import config_of, rows_limit_of
from draws import SAME_EXAMPLES, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_plan, oracle_rows_limit
from rank_pool import RankContext, RankPool
from run_case import fitted, oracle_of

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.overflow import drop_what_does_not_fit, rows_limit, rows_needed
from megatron_ncclep.errors import RowsDroppedError
from megatron_ncclep.ranks.group import EpGroup


def kept_by_the_oracle(case: Case, limit: int) -> list[torch.Tensor]:
    """Each rank's topk_idx, with -1 for the assignments that have no slot."""
    topk = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    kept = [torch.full_like(assignments, -1) for assignments in topk]
    for slots in oracle_plan(topk, case.num_experts, case.alignment, limit).slots:
        for slot in slots:
            if slot is not None:
                assignment = topk[slot.source][slot.token, slot.assignment]
                kept[slot.source][slot.token, slot.assignment] = assignment
    return kept


@settings(SAME_EXAMPLES, max_examples=150)
@given(case=cases().filter(lambda case: case.max_recv_rows))
def test_the_source_rank_keeps_what_has_a_slot(case: Case) -> None:
    limit = rows_limit_of(case)
    topk = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    counts = torch.stack([mine[mine >= 0].bincount(minlength=case.num_experts) for mine in topk])
    for rank, expected in enumerate(kept_by_the_oracle(case, limit)):
        kept = drop_what_does_not_fit(topk[rank], counts, rank, case.alignment, limit)
        assert torch.equal(kept, expected), f"rank {rank}"


@settings(SAME_EXAMPLES, max_examples=200)
@given(
    num_ranks=st.integers(1, 4),
    num_tokens=st.integers(0, 12),
    top_k=st.integers(1, 6),
    num_local=st.integers(1, 5),
    alignment=st.sampled_from([1, 16, 128]),
    rows=st.sampled_from(["worst", "0.001x", "0.5x", "1x", "1.25x", "3.333x", "400000x"]),
)
def test_limits_in_words_are_the_oracles(
    num_ranks: int, num_tokens: int, top_k: int, num_local: int, alignment: int, rows: str
) -> None:
    top_k = min(top_k, num_local * num_ranks)
    config = EpConfig(alignment=alignment, max_recv_rows=rows)
    limit = rows_limit(config, num_ranks, num_tokens, top_k, num_local)
    num_experts = num_local * num_ranks
    assert limit == oracle_rows_limit(rows, num_ranks, num_tokens, top_k, num_experts, alignment)


def test_worked_examples_of_limits() -> None:
    """Those in the module's docstring; a number is what it is; row numbers end at 2^31 - 1."""
    for rows, expected in (("worst", 96), ("1.25x", 64), (4096, 4096), (None, None)):
        assert rows_limit(EpConfig(alignment=16, max_recv_rows=rows), 4, 8, 2, 3) == expected
    config = EpConfig(alignment=16, max_recv_rows="worst")
    # Half of the assignments are copies for the other rank of an expert: 4 * 8 * 2 = 64 at most
    # again.
    assert rows_limit(config, 4, 8, 4, 3, ranks_per_expert=2) == 96
    assert rows_limit(config, 10**4, 10**6, 8, 8) == 2**31 - 16


@settings(SAME_EXAMPLES)
@given(case=cases())
def test_nothing_is_dropped_in_the_worst_case(case: Case) -> None:
    """And if all assignments go to the first experts, without an alignment, no row is too many."""
    case = dataclasses.replace(case, max_recv_rows="worst", tokens=(7,) * case.num_ranks)
    plan = oracle_of(case)
    assert not any(plan.num_dropped)
    if (case.skew, case.dropped, case.alignment) == (100.0, 0.0, 1):
        assert sum(plan.padded[0]) == rows_limit_of(case)


def test_rows_needed_are_those_without_a_limit() -> None:
    case = Case("needed", (20, 3, 11), 12, top_k=3, alignment=16, skew=0.7)
    topk = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    counts = torch.stack([assignments.flatten().bincount(minlength=12) for assignments in topk])
    expected = [sum(padded) for padded in oracle_of(case).padded]
    assert rows_needed(counts, 16).tolist() == expected


# All to the first experts: rank 0 lacks rows, and no other one receives any.
TOO_MUCH = Case("too-much", (40, 40), 8, 3, alignment=16, skew=100.0)


def raised_on_rank(ctx: RankContext, case: Case, engine_name: str, step: Case) -> list[str]:
    """What `check` raises after a plan that fits, one that is too large, and one that fits."""
    config = dataclasses.replace(config_of(case, engine_name), on_overflow="raise")
    said = []
    with closing(create_engine(ctx.group, case.num_experts, config)) as engine:
        for assignments in (step, case, step, step):
            engine.plan(assignments.on(ctx.device).topk_idx(ctx.rank))
            if assignments is not case:  # `case` and the second `step` together
                try:
                    EpGroup.of(ctx.group).check()
                    said.append("")
                except RowsDroppedError as error:
                    said.append(str(error))
        engine.plan(case.on(ctx.device).topk_idx(ctx.rank))
    EpGroup.of(ctx.group).check()  # what a closed engine dropped is no longer reported
    return said


@pytest.mark.needs_ranks(2)
@pytest.mark.needs_caps(test=lambda caps: "on_overflow" in caps.options)
@pytest.mark.parametrize("rows", [64, "0.5x"])
def test_every_rank_is_told_that_rows_were_dropped(
    pool: RankPool, engine_name: str, rows: int | str
) -> None:
    """A row dropped on one rank changes what others get back: all ranks must stop."""
    case = fitted(dataclasses.replace(TOO_MUCH, max_recv_rows=rows), pool, engine_name)
    step = dataclasses.replace(case, skew=0.0, dropped=0.9)
    assert not any(oracle_of(step, engine_name).num_dropped)
    results = pool.run(raised_on_rank, case, engine_name, step, ranks=case.num_ranks)
    unlimited = dataclasses.replace(case, max_recv_rows=None)
    needed = [sum(padded) for padded in oracle_of(unlimited, engine_name).padded]
    assert needed[1] == 0
    for first, raised, last in results:
        assert first == last == ""  # reported once: the next step is fine
        assert f"with max_recv_rows={rows}, rank 0 needed {needed[0]} rows and had " in raised
        assert f" had {rows_limit_of(case)} (each rank" in raised
        assert f"to {needed[0]} or more" in raised
        assert raised == results[0][1]
