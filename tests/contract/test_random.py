"""Many random batches over engines that stay open, exactly; on GPUs in sizes of a model.

In each step of a round, all ranks plan a new batch with one of the engines and then dispatch and
combine with any live plans, each time with another payload; no rank waits between these calls.
Then everything is compared, where it is, with the table oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from compare import assert_same_bits
from contract_cases import deadline_s
from draws import MAX_PLANS_ALIVE, SAME_EXAMPLES, Call, Round, Sizes, Step, rounds
from hypothesis import Phase, given, settings
from hypothesis import seed as seeded
from run_case import Tables, caps_of

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.ranks.pool import RankContext, RankPool
from megatron_ncclep.testing.contents import rows_of, weights_of

ON_CPU = Sizes(tokens=60, experts=32, hidden=(8, 64), elements=2**16)
ON_GPUS = Sizes(tokens=3000, experts=128, hidden=(128, 4096), elements=2**26)
# Every rank makes all ranks' tensors, and all of them on one GPU.
ON_ONE_GPU = Sizes(tokens=1500, experts=64, hidden=(128, 2048), elements=2**21)
STEPS = 10  # of a round, each with a batch


@dataclass(frozen=True)
class Batch:
    """A live plan, and the tables of all ranks, which say what it must be."""

    name: str
    engine: Engine
    plan: RoutePlan
    step: Step
    tables: Tables

    def call(self, ctx: RankContext, call: Call, sizes: Sizes) -> Callable[[], None]:
        """Queue a dispatch or a combine; returns what compares its results with the oracle's."""
        ranks, tables = range(ctx.num_ranks), self.tables
        lengths, columns = tables.num_rows, ()
        if call.is_dispatch:
            lengths, columns = list(self.step.tokens), (self.step.top_k,)
        most = sizes.elements // max(1, *self.step.tokens, *tables.num_rows)
        hidden = min(call.hidden, max(sizes.hidden[0], most // 8 * 8))
        rows = [rows_of(r, lengths[r], hidden, call.dtype, call.salt, ctx.device) for r in ranks]
        weights = None
        if call.has_weights:
            shapes = [(length, *columns) for length in lengths]
            weights = [weights_of(r, shapes[r], call.salt, ctx.device) for r in ranks]
        step = self.engine.dispatch if call.is_dispatch else self.engine.combine
        found = step(self.plan, rows[ctx.rank], weights and weights[ctx.rank])

        def compare() -> None:
            oracle = tables.dispatch if call.is_dispatch else tables.combine
            what = f"{step.__name__}, hidden size {hidden}, with the plan of {self.name}"
            for name, actual, expected in zip(
                ("rows", "weights"), found, oracle(ctx.rank, rows, weights), strict=True
            ):
                assert_same_bits(actual, expected, f"{what}: {name}")

        return compare


def round_on_rank(
    ctx: RankContext, engine_name: str, drawn: Round, sizes: Sizes
) -> tuple[str, int]:
    """Run a round to its end, whatever comes out: ranks that stop would leave others waiting.

    Returns:
        the first difference from the oracle on this rank, empty if there is none; and how many
        assignments for it were dropped.
    """
    difference, num_dropped = "", 0
    alive: list[Batch] = []
    with ExitStack() as stack:
        engines = []
        for member in drawn.members:
            config = EpConfig(
                engine=engine_name,
                alignment=member.alignment,
                max_recv_rows=member.max_recv_rows,
                timeout_s=deadline_s(engine_name, ctx.device),
            )
            engine = create_engine(ctx.group, member.num_experts, config)
            engines.append(stack.enter_context(closing(engine)))
            if member.max_recv_rows is not None and caps_of(engine_name).captures_static:
                # The largest first: no rank waits for another's host when a later one is larger.
                engine.plan(torch.full((sizes.tokens, 1), -1, device=ctx.device))
        for number, step in enumerate(drawn.steps):
            member, engine = drawn.members[step.member], engines[step.member]
            topk_idx = [step.topk_idx(rank, ctx.device) for rank in range(ctx.num_ranks)]
            plan = engine.plan(topk_idx[ctx.rank])
            limits = (member.num_experts, member.alignment, member.max_recv_rows)
            tables = Tables(engine_name, topk_idx, *limits)
            name = f"step {number} ({step.routing}, {member}, tokens {step.tokens})"
            alive.insert(0, Batch(name, engine, plan, step, tables))
            del alive[MAX_PLANS_ALIVE:]
            comparisons = [
                alive[call.plan % len(alive)].call(ctx, call, sizes) for call in step.calls
            ]
            num_dropped += int(tables.of_rank[ctx.rank].num_dropped)
            try:
                tables.assert_plan(plan, ctx.rank, name)
                for compare in comparisons:
                    compare()
            except AssertionError as error:
                difference = difference or f"rank {ctx.rank}: {error}"
    return difference, num_dropped


def test_random_batches_are_the_oracles(
    pool: RankPool,
    engine_name: str,
    backend: str,
    rank_counts: list[int],
    iterations: int,
    seed: int,
) -> None:
    """On a CPU a failing round is shrunk; on GPUs each try may cost a deadline."""
    caps = caps_of(engine_name)
    numbers = [n for n in rank_counts if n >= caps.min_ranks]
    on_gpus = ON_GPUS if numbers[-1] <= torch.cuda.device_count() else ON_ONE_GPU
    sizes = ON_CPU if backend == "gloo" else on_gpus
    num_dropped = 0

    @seeded(seed)
    @settings(
        SAME_EXAMPLES,
        derandomize=False,
        max_examples=max(1, iterations // STEPS),
        phases=[Phase.generate, *[Phase.shrink] * (backend == "gloo")],
        print_blob=False,
    )
    @given(drawn=rounds(caps, sizes, numbers, min(iterations, STEPS)))
    def check(drawn: Round) -> None:
        nonlocal num_dropped
        results = pool.run(round_on_rank, engine_name, drawn, sizes, ranks=drawn.num_ranks)
        num_dropped += sum(dropped for _, dropped in results)
        differences = [difference for difference, _ in results if difference]
        again = f"run it again with --seed {seed} --iterations {iterations} --ranks "
        again += " --ranks ".join(map(str, rank_counts))
        assert not differences, "\n".join([again, *differences])

    check()
    assert num_dropped or iterations < 60 or "max_recv_rows" not in caps.options
