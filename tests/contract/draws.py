"""What random tests draw: single cases, and rounds of a few engines that are open together.

A round is drawn as a whole before it runs, so that all ranks have the same one and hypothesis can
shrink it.  Ranks make the tensors from seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from contract_cases import LIBRARY_DTYPES, LIBRARY_HIDDEN
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.testing.cases import Case

MAX_TOP_K = 16
MAX_PLANS_ALIVE = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTINGS = ("uniform", "Zipf", "one expert", "one rank", "few assignments")
# The same examples everywhere; no timing assertions.
SAME_EXAMPLES = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 4) -> Case:
    """A small case, exact or static, with any alignment."""
    tokens = draw(st.lists(st.integers(0, 20), min_size=1, max_size=most_ranks))
    num_experts = draw(st.integers(1, 4)) * len(tokens)
    alignment = draw(st.sampled_from([1, 2, 16]))
    blocks = draw(st.none() | st.integers(1, 40))
    return Case(
        "random",
        tuple(tokens),
        num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        hidden=3,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        alignment=alignment,
        max_recv_rows=None if blocks is None else alignment * blocks,
        skew=draw(st.sampled_from([0.0, 0.7, 100.0])),
        dropped=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 100)),
    )


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
        member: number of the engine.
        routing: how tokens choose experts, one of ROUTINGS.
        tokens: of each rank.
        num_experts, top_k: of the batch.
        chosen: the expert, or an expert of the rank, that `routing` prefers.
        seed: of the routing.
        index_dtype: of topk_idx.
        calls: what follows the plan.
    """

    member: int
    routing: str
    tokens: tuple[int, ...]
    num_experts: int
    top_k: int
    chosen: int
    seed: int
    index_dtype: torch.dtype
    calls: tuple[Call, ...]

    def topk_idx(self, rank: int, device: str) -> torch.Tensor:
        """[tokens[rank], top_k]: distinct experts of each token, or -1."""
        generator = torch.Generator(device).manual_seed(self.seed + rank)
        shape, E, R = (self.tokens[rank], self.num_experts), self.num_experts, len(self.tokens)
        uniform = torch.rand(shape, generator=generator, device=device)
        # Gumbel noise: the largest sums of it and logarithms of odds are a draw by these odds.
        score = -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()
        if self.routing == "Zipf":
            order = torch.randperm(E, generator=generator, device=device)
            score -= 2 * (order + 1.0).log()
        elif self.routing == "one expert":
            score[:, self.chosen] = torch.inf
        elif self.routing == "one rank":
            score.view(len(score), R, E // R)[:, self.chosen // (E // R)] += 1e3
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
    if caps.compiles_at_run_time:
        num_local = st.sampled_from(sorted(LIBRARY_DTYPES))
    alignment = draw(st.sampled_from([1, 1, 16, 128]))
    rows = int(sizes.tokens * draw(st.sampled_from([0.3, 0, 1, 4])))
    limit = alignment * (1 + rows // alignment) if static else None
    return Member(ranks * draw(num_local), alignment, limit)


@st.composite
def steps(
    draw: st.DrawFn,
    caps: EngineCaps,
    sizes: Sizes,
    number: int,
    ranks: int,
    engines: Sequence[Member],
) -> Step:
    """Step `number` of a round."""
    index = draw(st.integers(0, len(engines) - 1))
    num_experts = engines[index].num_experts
    most = min(sizes.tokens, caps.max_tokens or sizes.tokens)
    # Often few, or at the edge of what kernels take at a time.
    few = st.sampled_from([n for n in (0, 1, 127, 128, 129) if n <= most])
    one = few | st.integers(0, most) | st.integers(most // 2, most)
    tokens = draw(st.lists(one, min_size=ranks, max_size=ranks))
    if number % 4 == 2:  # large sizes hardly ever leave a rank without tokens by chance
        tokens[draw(st.integers(0, ranks - 1))] = 0
    dtypes = [dtype for dtype in DTYPES if dtype in caps.payload_dtypes]
    if caps.compiles_at_run_time:
        dtypes = list(LIBRARY_DTYPES[num_experts // ranks])
    hidden_sizes = range(sizes.hidden[0], sizes.hidden[1] + 1, 8)
    call = st.builds(
        Call,
        plan=st.integers(0, MAX_PLANS_ALIVE - 1),
        is_dispatch=st.booleans(),
        has_weights=st.booleans(),
        hidden=st.sampled_from([LIBRARY_HIDDEN] if caps.compiles_at_run_time else hidden_sizes),
        dtype=st.sampled_from(dtypes),
        salt=st.integers(0, 2**31 - 1),
    )
    return Step(
        index,
        ROUTINGS[number % len(ROUTINGS)],
        tuple(tokens),
        num_experts,
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
