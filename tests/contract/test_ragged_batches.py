"""Static mode with `max_tokens_per_rank`: ranks and batches with any number of tokens up to it.

Packed sequences have other lengths on each rank and in each step.  Whoever trained with them could
not have a factor or 'worst', which counted on equally many tokens everywhere: the first plan was an
InputError.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from itertools import islice

import pytest
import torch
from contract_cases import OF_A_REFUSAL, local_ranks
from oracle import oracle_rows_limit
from rank_pool import RankContext, RankPool
from run_case import (
    all_steps_on_rank,
    assert_steps,
    calls,
    error_on_rank,
    fitted,
    opened,
    run_case,
)

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines import create_engine
from megatron_ncclep.errors import InputError, RefusedError
from megatron_ncclep.ranks.group import EpGroup

MOST = 23


def batches_of(case: Case) -> list[Case]:
    """None, one, a few and as many tokens as there may be, on other ranks each time."""
    ranks = range(case.num_ranks)
    batches = [tuple((7, MOST, 0, 1)[(r + step) % 4] for r in ranks) for step in range(4)]
    batches += [(MOST,) * case.num_ranks, (0,) * case.num_ranks, (2,) * case.num_ranks]
    return [dataclasses.replace(case, tokens=t, seed=i) for i, t in enumerate(batches)]


def in_turn_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[list[torch.Tensor]]:
    """The results of all calls with each batch; all plans are alive."""
    with opened(ctx, case, engine_name, max_tokens_per_rank=MOST) as (_, engine):
        turns = [calls(engine, batch.on(ctx.device), ctx.rank) for batch in batches_of(case)]
        for turn in turns:
            next(turn)
        return [list(islice(turn, 2))[-1] for turn in turns]


@pytest.mark.parametrize("rows", ["worst", "1.25x", 32], ids=str)
def test_every_batch_is_the_oracles(pool: RankPool, engine_name: str, rows: int | str) -> None:
    """And every tensor has the rows of the largest batch."""
    R = pool.size
    case = Case("ragged", (MOST,) * R, 4 * R, top_k=3, alignment=16, skew=0.7, max_recv_rows=rows)
    case = fitted(case, pool, engine_name)
    results = run_case(pool, in_turn_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    shape = (case.num_ranks, MOST, case.top_k, case.num_experts, case.alignment)
    case = dataclasses.replace(case, max_recv_rows=oracle_rows_limit(rows, *shape))
    for step, batch in enumerate(batches_of(case)):
        assert_steps(batch, engine_name, [mine[step] for mine in results])


def too_many_on_rank(ctx: RankContext, case: Case, engine_name: str, earlier: bool) -> str:
    """What this rank hears first when the last has too many tokens; `earlier`: in a second plan."""
    said = []
    case = dataclasses.replace(case, max_recv_rows="worst")
    options = {"max_tokens_per_rank": case.tokens[0]}
    # Where no rank waits for another's refusal, the group says it until it is closed.
    with suppress(RefusedError), opened(ctx, case, engine_name, **options) as (case, engine):
        if earlier:
            engine.plan(case.topk_idx(ctx.rank))
        larger = dataclasses.replace(case, tokens=(*case.tokens[:-1], case.tokens[-1] + 1))
        try:
            plan = engine.plan(larger.topk_idx(ctx.rank))
            engine.dispatch(plan, larger.rows(ctx.rank, plan.num_tokens, salt=2))
            EpGroup.of(ctx.group).check()
        except InputError as error:
            said.append(str(error))
    return said[0]


# On GPUs a later plan of that engine waits in NCCL, which a refusal does not reach: the other ranks
# learn of it at their deadline (docs/contract.md), and until then the one that closes waits too.
HEARS_AT_ONCE = pytest.mark.needs_caps(test=lambda caps: caps.name != "hierarchical")


@pytest.mark.needs_ranks(2)
@pytest.mark.parametrize(
    "earlier",
    [pytest.param(False, id="first"), pytest.param(True, id="later", marks=HEARS_AT_ONCE)],
)
def test_more_tokens_than_declared(pool: RankPool, engine_name: str, earlier: bool) -> None:
    """Every rank is told the numbers and the way out, and whose batch it was."""
    case = fitted(Case("many", (9,) * pool.size, 4 * pool.size), pool, engine_name)
    last, per_host = case.num_ranks - 1, local_ranks() or case.num_ranks
    over_hosts = case.num_ranks > per_host  # others may then know only that a rank has refused
    texts = pool.run(too_many_on_rank, case, engine_name, earlier, ranks=case.num_ranks)
    for rank, said in enumerate(texts):
        if over_hosts and rank != last and OF_A_REFUSAL.fullmatch(said):
            continue
        assert f"rank {last}: topk_idx has 10 tokens, more than max_tok" in said
        assert "max_tokens_per_rank 9: set --ncclep-max-tokens-per-rank to the most tokens" in said


def other_maximum_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    options = {"engine": engine_name, "max_recv_rows": "2x", "max_tokens_per_rank": 8 + ctx.rank}
    create_engine(ctx.group, case.num_experts, options)


@pytest.mark.needs_ranks(2)
def test_all_ranks_declare_the_same(pool: RankPool, engine_name: str) -> None:
    case = fitted(Case("declared", (8,) * pool.size, 4 * pool.size), pool, engine_name)
    arguments = (other_maximum_on_rank, case, engine_name)
    for kinds, said in pool.run(error_on_rank, *arguments, ranks=case.num_ranks):
        assert "InputError" in kinds
        assert "rank 0 has 8" in said
        assert "max_tokens_per_rank" in said


@pytest.mark.needs_ranks(2)
def test_uneven_batches_say_what_helps(pool: RankPool, engine_name: str) -> None:
    """Without the option."""
    tokens = tuple(3 + r for r in range(pool.size))
    case = fitted(Case("uneven", tokens, 4 * pool.size, max_recv_rows="worst"), pool, engine_name)
    arguments = (error_on_rank, all_steps_on_rank, case, engine_name)
    for kinds, said in pool.run(*arguments, ranks=case.num_ranks):
        assert "InputError" in kinds
        assert "unless max_tokens_per_rank says how many there are at most" in said
