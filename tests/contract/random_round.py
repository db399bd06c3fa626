"""Random rounds: what a rank does in one, drawn from a seed alike on every rank.

In a round a few engines of one group live side by side.  Each iteration plans a new batch with one
of them and then dispatches and combines with any plans that are still alive, in any order, each
time with another payload; nobody waits between these calls.  Then everything is compared, where it
is, with `table_oracle.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from compare import assert_same_bits
from contract_cases import LIBRARY_DTYPES, LIBRARY_HIDDEN, deadline_s
from run_case import ranks_on_node

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.engines.engine import EVERY_PART_ROUNDED, Engine, EngineCaps, RoutePlan
from megatron_ncclep.ranks.pool import RankContext
from megatron_ncclep.testing.contents import rows_of, weights_of
from megatron_ncclep.testing.table_oracle import (
    SlotTable,
    slot_table,
    table_combine,
    table_dispatch,
)

MAX_TOP_K = 16
MAX_PLANS_ALIVE = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Sizes:
    """What shapes are drawn from.

    Attributes:
        tokens: most of a rank.
        experts: most of the group.
        hidden: smallest and largest, multiples of 8.
        elements: most of one tensor of rows, unless the smallest hidden size has more.
    """

    tokens: int
    experts: int
    hidden: tuple[int, int]
    elements: int


ON_CPU = Sizes(tokens=60, experts=32, hidden=(8, 64), elements=2**16)
ON_GPUS = Sizes(tokens=3000, experts=128, hidden=(128, 4096), elements=2**26)
# Every rank makes all ranks' tensors, and all of them on one GPU.
ON_ONE_GPU = Sizes(tokens=1500, experts=64, hidden=(128, 2048), elements=2**21)


@dataclass(frozen=True)
class Member:
    """An engine and what it was made with."""

    engine: Engine
    num_experts: int
    config: EpConfig


@dataclass(frozen=True)
class Batch:
    """A plan that is alive, and what it must be.

    Attributes:
        name: for messages.
        tables: of all ranks.
        num_tokens: of all ranks.
    """

    name: str
    member: Member
    plan: RoutePlan
    tables: list[SlotTable]
    num_tokens: list[int]


def round_on_rank(
    ctx: RankContext,
    engine_name: str,
    seed: int,
    iterations: int,
    sizes: Sizes,
    timeout_s: float | None = None,
) -> tuple[str, Counter[str]]:
    """Run a round to its end, whatever comes out: ranks that stop would leave others waiting.

    Args:
        ctx: of this rank.
        engine_name: of the engines.
        seed: of everything that is drawn.
        iterations: how many batches.
        sizes: what they are drawn from.
        timeout_s: the engines' deadline; default: the tests'.

    Returns:
        the first difference from the oracle on this rank, empty if there is none; and how often
        what was drawn has which feature.
    """
    timeout_s = timeout_s or deadline_s(engine_name, ctx.device)
    draws = Draws(ctx, random.Random(seed), ENGINES[engine_name].caps, sizes, timeout_s)
    difference = ""
    batches: list[Batch] = []
    with ExitStack() as stack:
        members = [draws.member(engine_name, stack) for _ in range(draws.rng.randint(1, 3))]
        for iteration in range(iterations):
            # For certain: with large sizes chance alone hardly ever leaves a rank without tokens.
            has_idle_rank = iteration % 4 == 2
            member = draws.rng.choice(members)
            batch = draws.batch(f"iteration {iteration}", member, has_idle_rank)
            batches.append(batch)
            if len(batches) > MAX_PLANS_ALIVE:
                batches.pop(draws.rng.randrange(MAX_PLANS_ALIVE))
            used = [batch, *draws.rng.choices(batches, k=draws.rng.randint(1, 4))]
            calls = [draws.call(each) for each in used]
            if difference:
                continue
            try:
                check_plan(ctx.rank, batch)
                for call in calls:
                    call.check()
            except AssertionError as error:
                difference = f"rank {ctx.rank}: {error}"
    return difference, draws.features


class Draws:
    """Everything that is drawn; the state of `rng` is the same on every rank."""

    def __init__(
        self,
        ctx: RankContext,
        rng: random.Random,
        caps: EngineCaps,
        sizes: Sizes,
        timeout_s: float,
    ) -> None:
        self.ctx, self.rng, self.caps, self.sizes = ctx, rng, caps, sizes
        self.timeout_s = timeout_s
        self.ranks_on_node = ranks_on_node(caps.name, ctx.num_ranks)
        self.dtypes = [dtype for dtype in DTYPES if dtype in caps.payload_dtypes]
        self.features: Counter[str] = Counter()

    def member(self, engine_name: str, stack: ExitStack) -> Member:
        """An engine, closed with `stack`."""
        ranks, rng = self.ctx.num_ranks, self.rng
        most = min(self.sizes.experts // ranks, self.caps.max_local_experts or self.sizes.experts)
        num_local = rng.choice([1, 2, rng.randint(1, most), most])
        if self.caps.compiles_at_run_time:
            num_local = rng.choice(list(LIBRARY_DTYPES))
        alignment = rng.choice([1, 1, 16, 128])
        limit = None
        if "max_recv_rows" in self.caps.options and rng.random() < 0.5:
            rows = self.sizes.tokens * rng.choice([0, 0.3, 1, 4])
            limit = alignment * (1 + int(rows) // alignment)
            self.features["static"] += 1
        config = EpConfig(
            engine=engine_name,
            alignment=alignment,
            max_recv_rows=limit,
            timeout_s=self.timeout_s,
        )
        engine = create_engine(self.ctx.group, num_local * ranks, config)
        stack.enter_context(closing(engine))
        if limit is not None and self.caps.captures_static:
            # The largest batch first: no rank waits for another's host when a later one is larger.
            engine.plan(torch.full((self.sizes.tokens, 1), -1, device=self.ctx.device))
        return Member(engine, num_local * ranks, config)

    def batch(self, name: str, member: Member, has_idle_rank: bool) -> Batch:
        """A new plan."""
        rng, config = self.rng, member.config
        num_tokens = [self._num_tokens() for _ in range(self.ctx.num_ranks)]
        if has_idle_rank:
            num_tokens[rng.randrange(self.ctx.num_ranks)] = 0
        top_k = rng.randint(1, min(MAX_TOP_K, member.num_experts, self.caps.max_top_k or MAX_TOP_K))
        kind = rng.choice(list(ROUTINGS))
        generator = torch.Generator(self.ctx.device).manual_seed(rng.randrange(2**31))
        topk_idx = [
            ROUTINGS[kind](rng, generator, count, member.num_experts, top_k, self.ctx.num_ranks)
            for count in num_tokens
        ]
        dtype = rng.choice([torch.int64, torch.int32])
        plan = member.engine.plan(topk_idx[self.ctx.rank].to(dtype))
        tables = [
            slot_table(
                rank,
                topk_idx,
                member.num_experts,
                config.block_alignment,
                config.max_recv_rows,
                self.ranks_on_node,
            )
            for rank in range(self.ctx.num_ranks)
        ]
        name += (
            f" ({member.num_experts} experts, top-{top_k}, {num_tokens} tokens, {kind}, alignment "
            f"{config.block_alignment}, max_recv_rows {config.max_recv_rows})"
        )
        self.features[kind] += 1
        self.features["a rank without tokens"] += 0 in num_tokens
        self.features["overflow"] += any(int(table.num_dropped) for table in tables)
        return Batch(name, member, plan, tables, num_tokens)

    def call(self, batch: Batch) -> Call:
        """A dispatch or a combine with a plan, queued."""
        rng, device, ranks = self.rng, self.ctx.device, range(self.ctx.num_ranks)
        is_dispatch, has_weights = rng.random() < 0.5, rng.random() < 0.7
        salt = rng.randrange(2**31)
        num_rows = batch.num_tokens if is_dispatch else [t.num_rows for t in batch.tables]
        hidden, dtype = self._payload(batch, max(*batch.num_tokens, *num_rows))
        rows = [rows_of(r, num_rows[r], hidden, dtype, salt, device) for r in ranks]
        weights = None
        if has_weights:
            top_k = (batch.plan.top_k,) if is_dispatch else ()
            weights = [weights_of(r, (num_rows[r], *top_k), salt, device) for r in ranks]
        engine, rank = batch.member.engine, self.ctx.rank
        step = engine.dispatch if is_dispatch else engine.combine
        out, values = step(batch.plan, rows[rank], None if weights is None else weights[rank])
        self.features["with weights" if has_weights else "without weights"] += 1
        self.features["dispatch" if is_dispatch else "combine"] += 1
        round_source_part = self.caps.reduction == EVERY_PART_ROUNDED
        node = self.ranks_on_node
        return Call(batch, is_dispatch, rows, weights, out, values, rank, round_source_part, node)

    def _num_tokens(self) -> int:
        """Of one rank: often few, or at the edge of what kernels take at a time."""
        rng = self.rng
        most = min(self.sizes.tokens, self.caps.max_tokens or self.sizes.tokens)
        few = rng.choice([0, 1, rng.randint(2, 20), 127, 128, 129])
        return rng.choice([min(few, most), rng.randint(0, most), rng.randint(most // 2, most)])

    def _payload(self, batch: Batch, num_rows: int) -> tuple[int, torch.dtype]:
        """Hidden size and dtype, whatever those were that the plan had before."""
        if self.caps.compiles_at_run_time:
            num_local = batch.member.num_experts // self.ctx.num_ranks
            return LIBRARY_HIDDEN, self.rng.choice(LIBRARY_DTYPES[num_local])
        least, most = self.sizes.hidden
        most = max(least, min(most, self.sizes.elements // max(num_rows, 1)))
        return 8 * self.rng.randint(least // 8, most // 8), self.rng.choice(self.dtypes)


@dataclass(frozen=True)
class Call:
    """A call of dispatch or combine: all ranks' arguments and this rank's results."""

    batch: Batch
    is_dispatch: bool
    rows: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    out: torch.Tensor
    values: torch.Tensor | None
    rank: int
    round_source_part: bool
    ranks_on_node: int | None

    def check(self) -> None:
        """Raise AssertionError when the results are not the oracle's."""
        batch = self.batch
        if self.is_dispatch:
            expected = table_dispatch(
                batch.tables[self.rank],
                self.rows,
                self.weights,
                ranks_on_node=self.ranks_on_node,
            )
        else:
            expected = table_combine(
                batch.tables,
                batch.num_tokens,
                self.rank,
                batch.plan.top_k,
                self.rows,
                self.weights,
                self.round_source_part,
                self.ranks_on_node,
            )
        step = "dispatch" if self.is_dispatch else "combine"
        what = f"{step}, hidden size {self.rows[0].shape[1]}, with a plan of {batch.name}"
        assert_same_bits(self.out, expected[0], f"{what}: rows")
        assert (self.values is None) == (self.weights is None), f"{what}: presence of weights"
        if self.values is not None and expected[1] is not None:
            assert_same_bits(self.values, expected[1], f"{what}: weights")


def check_plan(rank: int, batch: Batch) -> None:
    """Raise AssertionError when a plan's numbers are not the oracle's."""
    plan, table = batch.plan, batch.tables[rank]
    assert plan.num_rows == table.num_rows, f"{batch.name}: num_rows"
    assert_same_bits(plan.tokens_per_expert, table.padded, f"{batch.name}: tokens_per_expert")
    assert_same_bits(plan.routed_per_expert, table.routed, f"{batch.name}: routed_per_expert")
    assert_same_bits(plan.num_dropped, table.num_dropped, f"{batch.name}: num_dropped")


# --- routings: [num_tokens, top_k] int64, distinct experts of each token or -1 --------------------


def scores(generator: torch.Generator, num_tokens: int, num_experts: int) -> torch.Tensor:
    """Of the Gumbel distribution: with logarithms of odds added, the largest are a draw by them."""
    uniform = torch.rand(num_tokens, num_experts, generator=generator, device=generator.device)
    return -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()


def largest(score: torch.Tensor, top_k: int) -> torch.Tensor:
    return score.topk(top_k, dim=1).indices if len(score) else score.new_empty(0, top_k).long()


def uniform(rng: Any, generator: Any, T: int, E: int, K: int, R: int) -> torch.Tensor:
    return largest(scores(generator, T, E), K)


def zipf(rng: Any, generator: Any, T: int, E: int, K: int, R: int) -> torch.Tensor:
    """A few experts get most, the same ones from all tokens of a rank."""
    order = torch.randperm(E, generator=generator, device=generator.device)
    return largest(scores(generator, T, E) - rng.choice([1, 2]) * (order + 1.0).log(), K)


def one_expert(rng: Any, generator: Any, T: int, E: int, K: int, R: int) -> torch.Tensor:
    """Every token names one expert; half of the time nothing else."""
    expert = rng.randrange(E)
    score = scores(generator, T, E)
    score[:, expert] = torch.inf
    assignments = largest(score, K)
    return assignments if rng.random() < 0.5 else assignments.masked_fill(assignments != expert, -1)


def one_rank(rng: Any, generator: Any, T: int, E: int, K: int, R: int) -> torch.Tensor:
    """As many assignments as possible go to one rank."""
    score = scores(generator, T, E)
    score.view(T, R, E // R)[:, rng.randrange(R)] += 1e3
    return largest(score, K)


def few_assignments(rng: Any, generator: Any, T: int, E: int, K: int, R: int) -> torch.Tensor:
    assignments = largest(scores(generator, T, E), K)
    gone = torch.rand(T, K, generator=generator, device=generator.device) < rng.choice([0.3, 0.95])
    return assignments.masked_fill(gone, -1)


ROUTINGS = {
    "uniform": uniform,
    "Zipf": zipf,
    "one expert": one_expert,
    "one rank": one_rank,
    "few assignments": few_assignments,
}


def rounds(seed: int, iterations: int, per_round: int = 10) -> Iterator[tuple[int, int]]:
    """The seed and the iterations of each round."""
    for first in range(0, iterations, per_round):
        yield seed + first // per_round, min(per_round, iterations - first)
