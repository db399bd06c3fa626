"""Runs one case on the ranks of a pool; a case beyond the engine's caps must be refused instead."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from compare import assert_same_bits
from contract_cases import (
    GROUP_LIMITS,
    PAYLOAD_LIMITS,
    caps_of,
    config_of,
    for_engine,
    local_ranks,
    refusal_words,
    rows_limit_of,
)
from oracle import OraclePlan, oracle_combine, oracle_dispatch, oracle_plan
from rank_pool import RankContext, RankPool

import megatron_ncclep
from megatron_ncclep.benchmark.cases import Case, refusal
from megatron_ncclep.benchmark.table_oracle import slot_table, table_combine, table_dispatch
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import (
    BY_RANK,
    EVERY_PART_ROUNDED,
    NODE_SUMS_ROUNDED,
    Engine,
    RoutePlan,
)
from megatron_ncclep.errors import EngineUnavailableError, EpError, InputError
from megatron_ncclep.ranks.group import EpGroup


class Sums(NamedTuple):
    """How the engine's combine adds up: the oracle's arguments of the same names.

    With nodes of one rank each, sums of nodes are parts of ranks, all of them rounded.
    """

    round_source_part: bool
    ranks_on_node: int | None

    @staticmethod
    def of(engine_name: str, num_ranks: int) -> Sums:
        reduction = caps_of(engine_name, num_ranks).reduction
        if reduction == NODE_SUMS_ROUNDED:
            on_node = ranks_on_node(num_ranks)
            return Sums(on_node == 1, on_node)
        return Sums(reduction == EVERY_PART_ROUNDED, None)


def ranks_on_node(num_ranks: int) -> int:
    """How many of a group's ranks a node has.

    Ranks of one host, which NCCLEP_LOCAL_RANKS may divide into nodes, or of several.
    """
    return min(local_ranks() or num_ranks, num_ranks)


def order_of(engine_name: str, num_ranks: int) -> int | None:
    """What `ranks_on_node` of the oracle's plan must be for the engine."""
    return None if caps_of(engine_name).slot_order == BY_RANK else ranks_on_node(num_ranks)


def oracle_of(case: Case, engine_name: str = "reference") -> OraclePlan:
    """The slots that the case's assignments must get."""
    return oracle_plan(
        [case.topk_idx(rank) for rank in range(case.num_ranks)],
        case.num_experts,
        case.alignment,
        rows_limit_of(case),
        order_of(engine_name, case.num_ranks),
    )


def fitted(case: Case, pool: RankPool, engine_name: str) -> Case:
    """The case on the ranks that the pool has, in shapes that the engine is tested with.

    They fill nodes, for an engine to which nodes matter.
    """
    ranks = min(pool.size, case.num_ranks)
    if caps_of(engine_name, ranks).reduction == NODE_SUMS_ROUNDED:
        on_node = ranks_on_node(ranks)
        ranks = ranks // on_node * on_node
    ranks = next(n for n in range(ranks, 0, -1) if case.num_experts % n == 0)
    case = dataclasses.replace(case, tokens=case.tokens[:ranks])
    return for_engine(case, caps_of(engine_name))


@contextmanager
def opened(
    ctx: RankContext, case: Case, engine_name: str, **options: Any
) -> Iterator[tuple[Case, Engine]]:
    """The case with its tensors on this rank's device, and its engine, closed in the end.

    NaN that a failed wait of the device has left is an error here, and not a wrong result.
    """
    case = case.on(ctx.device)
    config = dataclasses.replace(config_of(case, engine_name), **options)
    engine = create_engine(ctx.group, case.num_experts, config)
    try:
        yield case, engine
        EpGroup.of(ctx.group).check()
    finally:
        engine.close()


def run_case(
    pool: RankPool,
    function: Callable[..., Any],
    case: Case,
    engine_name: str,
    *args: Any,
    plans_only: bool = False,
) -> list[Any] | None:
    """Run `function(ctx, case, engine_name, *args)` on the case's ranks.

    Args:
        plans_only: the function moves no rows, so that limits of the payload do not matter.

    Returns:
        what the ranks returned; None when the case is beyond the engine's caps: then it was
        asserted here that every rank refused it and named the limit.
    """
    limit = refusal(case, caps_of(engine_name))
    if limit is None or (plans_only and limit in PAYLOAD_LIMITS):
        return pool.run(function, case, engine_name, *args, ranks=case.num_ranks)
    answers = pool.run(error_on_rank, function, case, engine_name, *args, ranks=case.num_ranks)
    expected = EngineUnavailableError if limit in GROUP_LIMITS else InputError
    for rank, (kinds, text) in enumerate(answers):
        assert expected.__name__ in kinds, (
            f"rank {rank}: {case} is beyond {limit} of engine {engine_name}, but got "
            f"{kinds[:1] or 'no error'}: {text}"
        )
        for word in refusal_words(limit, case, caps_of(engine_name)):
            assert re.search(rf"\b{re.escape(word)}\b", text), (
                f"rank {rank}: the error about {limit} does not say {word}: {text}"
            )
    return None


def error_on_rank(
    ctx: RankContext, function: Callable[..., Any], case: Case, engine_name: str, *args: Any
) -> tuple[list[str], str]:
    """The names of the error's class and its bases, and its text; empty if there is none."""
    try:
        function(ctx, case, engine_name, *args)
    except EpError as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], ""


@contextmanager
def own_group(ctx: RankContext, **environment: str) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, made where there are these variables, that a test may leave failed."""
    group = dist.new_group(list(range(ctx.num_ranks)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield group
    megatron_ncclep.close(group)
    dist.destroy_process_group(group)


def calls(
    engine: Engine, case: Case, rank: int, plan: RoutePlan | None = None
) -> Iterator[list[torch.Tensor]]:
    """Make a call each time: plan, unless there is one, and then dispatch and combine in turn.

    Yields:
        after combine received rows and weights, and then returned rows and weights; before it what
        there is of these.
    """
    if plan is None:
        plan = engine.plan(case.topk_idx(rank))
        yield []
    while True:
        x, w = case.rows(rank, plan.num_tokens, salt=2), case.weights(rank)
        rows, row_w = engine.dispatch(plan, x, w)
        assert row_w is not None
        yield [rows, row_w]
        out, topk_w = engine.combine(plan, case.rows(rank, plan.num_rows, salt=5), row_w)
        assert topk_w is not None
        yield [rows, row_w, out, topk_w]


def all_steps_on_rank(
    ctx: RankContext, case: Case, engine_name: str, **options: Any
) -> list[torch.Tensor]:
    """Plan, dispatch, combine: received rows and weights, then returned rows and weights."""
    with opened(ctx, case, engine_name, **options) as (case, engine):
        _, _, results = islice(calls(engine, case, ctx.rank), 3)
        return results


def assert_steps(case: Case, engine_name: str, results: list[list[torch.Tensor]]) -> None:
    """Compare what all `calls` gave on each rank with the oracle."""
    ranks = range(case.num_ranks)
    oracle = oracle_of(case, engine_name)
    x = [case.rows(r, case.tokens[r], salt=2) for r in ranks]
    rows, row_w = oracle_dispatch(oracle, x, [case.weights(r) for r in ranks])
    y = [case.rows(r, len(oracle.slots[r]), salt=5) for r in ranks]
    out, topk_w = oracle_combine(oracle, y, row_w, *Sums.of(engine_name, case.num_ranks))
    names = ("rows", "weights", "output", "weights back")
    for rank, expected in enumerate(zip(rows, row_w, out, topk_w, strict=True)):
        for name, mine, right in zip(names, results[rank], expected, strict=True):
            assert_same_bits(mine, right, f"{case}: {name} of rank {rank}")


class Tables:
    """The table oracle for one batch of all ranks, in the engine's orders of slots and sums.

    Attributes:
        of_rank: the table of each rank.
        num_rows: that each rank receives.
    """

    def __init__(
        self,
        engine_name: str,
        topk_idx: list[torch.Tensor],
        num_experts: int,
        alignment: int = 1,
        max_recv_rows: int | None = None,
    ) -> None:
        num_ranks = len(topk_idx)
        self._topk_idx, self._sums = topk_idx, Sums.of(engine_name, num_ranks)
        order = order_of(engine_name, num_ranks)
        options = (num_experts, alignment, max_recv_rows, order)
        self.of_rank = [slot_table(rank, topk_idx, *options) for rank in range(num_ranks)]
        self.num_rows = [table.num_rows for table in self.of_rank]

    def assert_plan(self, plan: RoutePlan, rank: int, what: str) -> None:
        """Compare the numbers of a plan of `rank`."""
        table = self.of_rank[rank]
        assert plan.num_rows == table.num_rows, f"{what}: num_rows"
        assert_same_bits(plan.tokens_per_expert, table.padded, f"{what}: tokens_per_expert")
        assert_same_bits(plan.routed_per_expert, table.routed, f"{what}: routed_per_expert")
        assert_same_bits(plan.num_dropped, table.num_dropped, f"{what}: num_dropped")

    def dispatch(
        self,
        rank: int,
        x: list[torch.Tensor],
        w: list[torch.Tensor] | None = None,
        rows: slice = slice(None),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `rank` receives, or these rows of it."""
        return table_dispatch(self.of_rank[rank], x, w, rows=rows)

    def combine(
        self, rank: int, y: list[torch.Tensor], w: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What comes back to `rank`."""
        num_tokens, top_k = [len(mine) for mine in self._topk_idx], self._topk_idx[rank].shape[1]
        arguments = (self.of_rank, num_tokens, rank, top_k, y, w)
        return table_combine(*arguments, *self._sums)
