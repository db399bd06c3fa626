"""One rank's part of a random round.

Each step plans a new batch with one of the engines and then dispatches and combines with any plans
that are still alive, each time with another payload; no rank waits between these calls.  Then
everything is compared, where it is, with the table oracle.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from compare import assert_same_bits
from contract_cases import deadline_s
from draws import MAX_PLANS_ALIVE, Call, Round, Routing, Sizes
from run_case import ranks_on_node, rounds_source_part

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.ranks.pool import RankContext
from megatron_ncclep.testing.contents import rows_of, weights_of
from megatron_ncclep.testing.table_oracle import (
    SlotTable,
    slot_table,
    table_combine,
    table_dispatch,
)


@dataclass(frozen=True)
class Batch:
    """A plan that is alive, and the tables of all ranks, which say what it must be."""

    name: str
    engine: Engine
    plan: RoutePlan
    routing: Routing
    tables: list[SlotTable]

    def check(self, rank: int) -> None:
        """Raise AssertionError when the plan's numbers are not the oracle's."""
        table = self.tables[rank]
        assert self.plan.num_rows == table.num_rows, f"{self.name}: num_rows"
        for name, expected in (
            ("tokens_per_expert", table.padded),
            ("routed_per_expert", table.routed),
            ("num_dropped", table.num_dropped),
        ):
            assert_same_bits(getattr(self.plan, name), expected, f"{self.name}: {name}")


def round_on_rank(
    ctx: RankContext, engine_name: str, drawn: Round, sizes: Sizes, timeout_s: float | None = None
) -> tuple[str, int]:
    """Run a round to its end, whatever comes out: ranks that stop would leave others waiting.

    Args:
        ctx: of this rank.
        engine_name: of the engines.
        drawn: the round.
        sizes: what it was drawn from.
        timeout_s: the engines' deadline; default: the tests'.

    Returns:
        the first difference from the oracle on this rank, empty if there is none; and how many
        assignments for it were dropped.
    """
    caps, on_node = ENGINES[engine_name].caps, ranks_on_node(engine_name, ctx.num_ranks)
    difference, num_dropped = "", 0
    alive: list[Batch] = []
    with ExitStack() as stack:
        engines = []
        for member in drawn.members:
            config = EpConfig(
                engine=engine_name,
                alignment=member.alignment,
                max_recv_rows=member.max_recv_rows,
                timeout_s=timeout_s or deadline_s(engine_name, ctx.device),
            )
            engine = create_engine(ctx.group, member.num_experts, config)
            engines.append(stack.enter_context(closing(engine)))
            if member.max_recv_rows is not None and caps.captures_static:
                # The largest first: no rank waits for another's host when a later one is larger.
                engine.plan(torch.full((sizes.tokens, 1), -1, device=ctx.device))
        for number, step in enumerate(drawn.steps):
            member, engine, routing = drawn.members[step.member], engines[step.member], step.routing
            topk_idx = [routing.topk_idx(rank, ctx.device) for rank in range(ctx.num_ranks)]
            plan = engine.plan(topk_idx[ctx.rank])
            limits = (member.num_experts, member.alignment, member.max_recv_rows, on_node)
            tables = [slot_table(rank, topk_idx, *limits) for rank in range(ctx.num_ranks)]
            alive.insert(0, Batch(f"step {number} ({routing})", engine, plan, routing, tables))
            del alive[MAX_PLANS_ALIVE:]
            calls = []
            for call in step.calls:
                batch = alive[call.plan % len(alive)]
                most = max(*batch.routing.tokens, *(table.num_rows for table in batch.tables))
                calls.append(Result(ctx, engine_name, batch, call, call.hidden(caps, sizes, most)))
            num_dropped += int(tables[ctx.rank].num_dropped)
            try:
                alive[0].check(ctx.rank)
                for result in calls:
                    result.check()
            except AssertionError as error:
                difference = difference or f"rank {ctx.rank}: {error}"
    return difference, num_dropped


class Result:
    """A call of dispatch or combine, queued: all ranks' arguments and this rank's results."""

    def __init__(
        self, ctx: RankContext, engine_name: str, batch: Batch, call: Call, hidden: int
    ) -> None:
        self.batch, self.call, self.hidden, self.rank = batch, call, hidden, ctx.rank
        self.round_source_part = rounds_source_part(engine_name)
        self.on_node = ranks_on_node(engine_name, ctx.num_ranks)
        ranks, top_k = range(ctx.num_ranks), ()
        num_rows = [table.num_rows for table in batch.tables]
        if call.is_dispatch:
            num_rows, top_k = list(batch.routing.tokens), (batch.plan.top_k,)
        self.rows = [
            rows_of(r, num_rows[r], hidden, call.dtype, call.salt, ctx.device) for r in ranks
        ]
        self.weights = None
        if call.has_weights:
            self.weights = [
                weights_of(r, (num_rows[r], *top_k), call.salt, ctx.device) for r in ranks
            ]
        step = batch.engine.dispatch if call.is_dispatch else batch.engine.combine
        mine = None if self.weights is None else self.weights[ctx.rank]
        self.out, self.values = step(batch.plan, self.rows[ctx.rank], mine)

    def check(self) -> None:
        """Raise AssertionError when the results are not the oracle's."""
        batch = self.batch
        if self.call.is_dispatch:
            expected, values = table_dispatch(
                batch.tables[self.rank], self.rows, self.weights, ranks_on_node=self.on_node
            )
        else:
            expected, values = table_combine(
                batch.tables,
                list(batch.routing.tokens),
                self.rank,
                batch.plan.top_k,
                self.rows,
                self.weights,
                self.round_source_part,
                self.on_node,
            )
        step = "dispatch" if self.call.is_dispatch else "combine"
        what = f"{step}, hidden size {self.hidden}, with the plan of {batch.name}"
        assert_same_bits(self.out, expected, f"{what}: rows")
        assert (self.values is None) == (values is None), f"{what}: presence of weights"
        if self.values is not None and values is not None:
            assert_same_bits(self.values, values, f"{what}: weights")
