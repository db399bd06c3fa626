"""Many random batches over engines that stay open, exactly; on GPUs in sizes of a model.

In each step of a round, all ranks plan a new batch with one of the engines and then dispatch and
combine with any live plans, each time with another payload; no rank waits between these calls.
Then everything is compared, where it is, with the table oracle.

A round is drawn as a whole before it runs, so that all ranks have the same one and hypothesis can
shrink it.  Ranks make the tensors from seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass

import torch
from compare import assert_same_bits
from contract_cases import COMPILING, LIBRARY_DTYPES, LIBRARY_HIDDEN, caps_of, deadline_s
from draws import SAME_EXAMPLES
from hypothesis import Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from rank_pool import RankContext, RankPool
from run_case import Tables

from megatron_ncclep.benchmark.contents import rows_of, weights_of
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, EngineCaps, RoutePlan

MAX_TOP_K = 16
MAX_PLANS_ALIVE = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTINGS = ("uniform", "Zipf", "one expert", "one rank", "few assignments")
STEPS = 10  # of a round, each with a batch


# --- what is drawn -------------------------------------------------------------------------------


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
    """One engine of a round."""

    num_experts: int
    alignment: int
    max_recv_rows: int | None


@dataclass(frozen=True)
class Call:
    """A dispatch or a combine.

    Attributes:
        plan: number of a live plan, counted from the newest.
        is_dispatch, has_weights: what is called.
        hidden: number of columns, unless that is too many for the rows there are.
        dtype: of rows.
        salt: of their values.
    """

    plan: int
    is_dispatch: bool
    has_weights: bool
    hidden: int
    dtype: torch.dtype
    salt: int


@dataclass(frozen=True)
class Step:
    """A new batch for one of the engines, and calls with live plans.

    Attributes:
        member: the engine.
        routing: how tokens choose experts, one of ROUTINGS.
        tokens: of each rank.
        top_k: of the batch.
        chosen: the expert, or an expert of the rank, that `routing` prefers.
        seed: of the routing.
        index_dtype: of topk_idx.
        calls: what follows the plan.
    """

    member: Member
    routing: str
    tokens: tuple[int, ...]
    top_k: int
    chosen: int
    seed: int
    index_dtype: torch.dtype
    calls: tuple[Call, ...]

    def topk_idx(self, rank: int, device: str) -> torch.Tensor:
        """[tokens[rank], top_k]: distinct experts of each token, or -1."""
        generator = torch.Generator(device).manual_seed(self.seed + rank)
        T, E, R = self.tokens[rank], self.member.num_experts, len(self.tokens)
        uniform = torch.rand(T, E, generator=generator, device=device)
        # Gumbel noise: the largest sums of it and logarithms of odds are a draw by these odds.
        score = -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()
        if self.routing == "Zipf":
            order = torch.randperm(E, generator=generator, device=device)
            score -= 2 * (order + 1.0).log()
        elif self.routing == "one expert":
            score[:, self.chosen] = torch.inf
        elif self.routing == "one rank":
            score.view(T, R, E // R)[:, self.chosen // (E // R)] += 1e3
        topk_idx = score.argsort(dim=1, descending=True)[:, : self.top_k]
        if self.routing == "few assignments":
            dropped = torch.rand(topk_idx.shape, generator=generator, device=device) < 0.7
            topk_idx = topk_idx.masked_fill(dropped, -1)
        return topk_idx.to(self.index_dtype)


@dataclass(frozen=True)
class Round:
    """Engines, and the steps that they take."""

    num_ranks: int
    members: tuple[Member, ...]
    steps: tuple[Step, ...]


@st.composite
def members(draw: st.DrawFn, caps: EngineCaps, sizes: Sizes, ranks: int, static: bool) -> Member:
    """An engine, in static mode or not."""
    most = min(sizes.experts // ranks, caps.max_local_experts or sizes.experts)
    num_local = st.sampled_from([1, min(2, most), most]) | st.integers(1, most)
    if caps.name in COMPILING:
        num_local = st.sampled_from(sorted(LIBRARY_DTYPES))
    alignment = draw(st.sampled_from([1, 1, 16, 128]))
    rows = int(sizes.tokens * draw(st.sampled_from([0.3, 0, 1, 4])))
    limit = alignment * (1 + rows // alignment) if static else None
    return Member(ranks * draw(num_local), alignment, limit)


@st.composite
def steps(
    draw: st.DrawFn, caps: EngineCaps, sizes: Sizes, number: int, ranks: int, of: Sequence[Member]
) -> Step:
    """Step `number` of a round."""
    member = draw(st.sampled_from(of))
    num_experts = member.num_experts
    most = min(sizes.tokens, caps.max_tokens or sizes.tokens)
    # Often few, or at the edge of what kernels take at a time.
    few = st.sampled_from([n for n in (0, 1, 127, 128, 129) if n <= most])
    one = few | st.integers(0, most) | st.integers(most // 2, most)
    tokens = draw(st.lists(one, min_size=ranks, max_size=ranks))
    if number % 4 == 2:  # large sizes hardly ever leave a rank without tokens by chance
        tokens[draw(st.integers(0, ranks - 1))] = 0
    dtypes = [dtype for dtype in DTYPES if dtype in caps.payload_dtypes]
    if caps.name in COMPILING:
        dtypes = list(LIBRARY_DTYPES[num_experts // ranks])
    hidden_sizes = range(sizes.hidden[0], sizes.hidden[1] + 1, 8)
    call = st.builds(
        Call,
        plan=st.integers(0, MAX_PLANS_ALIVE - 1),
        is_dispatch=st.booleans(),
        has_weights=st.booleans(),
        hidden=st.sampled_from([LIBRARY_HIDDEN] if caps.name in COMPILING else hidden_sizes),
        dtype=st.sampled_from(dtypes),
        salt=st.integers(0, 2**31 - 1),
    )
    return Step(
        member,
        ROUTINGS[number % len(ROUTINGS)],
        tuple(tokens),
        top_k=draw(st.integers(1, min(MAX_TOP_K, num_experts, caps.max_top_k or MAX_TOP_K))),
        chosen=draw(st.integers(0, num_experts - 1)),
        seed=draw(st.integers(0, 2**30)),
        index_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        calls=tuple(draw(st.lists(call, min_size=2, max_size=5))),
    )


@st.composite
def rounds(
    draw: st.DrawFn, caps: EngineCaps, sizes: Sizes, rank_counts: Sequence[int], length: int = 10
) -> Round:
    """A round of `length` steps, with all kinds of routing, and static mode if there is one."""
    ranks = draw(st.sampled_from(list(rank_counts)))
    modes = [False, True] if "max_recv_rows" in caps.options else [False]
    modes += draw(st.lists(st.sampled_from(modes), max_size=1))
    engines = tuple(draw(members(caps, sizes, ranks, static)) for static in modes)
    taken = [draw(steps(caps, sizes, number, ranks, engines)) for number in range(length)]
    return Round(ranks, engines, tuple(taken))


# --- what runs -----------------------------------------------------------------------------------


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
        engines = {}
        for member in drawn.members:
            options = {"alignment": member.alignment, "max_recv_rows": member.max_recv_rows}
            options |= {"engine": engine_name, "timeout_s": deadline_s(engine_name, ctx.device)}
            engine = create_engine(ctx.group, member.num_experts, options)
            engines[member] = stack.enter_context(closing(engine))
            if member.max_recv_rows is not None and caps_of(engine_name).captures_static:
                # The largest first: no rank waits for another's host when a later one is larger.
                engine.plan(torch.full((sizes.tokens, 1), -1, device=ctx.device))
        for number, step in enumerate(drawn.steps):
            engine = engines[step.member]
            topk_idx = [step.topk_idx(rank, ctx.device) for rank in range(ctx.num_ranks)]
            plan = engine.plan(topk_idx[ctx.rank])
            tables = Tables(engine_name, topk_idx, *astuple(step.member))
            name = f"step {number} ({step.routing}, {step.member}, tokens {step.tokens})"
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
