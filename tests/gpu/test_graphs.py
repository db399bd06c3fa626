"""Static mode in a CUDA graph: captured once, replayed with other routings and payloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from compare import assert_same_bits
from contract_cases import caps_of, config_of, rows_limit_of
from rank_pool import RankContext, RankPool
from run_case import Tables, fitted

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.contents import rows_of, weights_of
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.errors import InputError
from megatron_ncclep.integration.checks import optimizer_step as step_check

pytestmark = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)

# Of the first case, and of each other one.
MOST_REPLAYS, NUM_REPLAYS = 100, 10

# T = 200: more than one of the chunks in which kernels take tokens.
CASE = Case("room", (200, 131, 0, 64), 16, 4, hidden=256, max_recv_rows=2048, dropped=0.1)
CASES = [
    CASE,
    dataclasses.replace(CASE, name="overflow", max_recv_rows=160),
    dataclasses.replace(CASE, name="aligned-overflow", alignment=16, max_recv_rows=320),
    dataclasses.replace(CASE, name="skewed-bf16", skew=0.7, dtype=torch.bfloat16),
    dataclasses.replace(CASE, name="ragged", max_recv_rows="worst"),
]


# Of a step.
RESULTS = ("rows", "row_w", "out", "none", "y.grad", "none", "x.grad", "w.grad")


class Layer:
    """One layer's calls over tensors that stay where they are, forward and backward."""

    def __init__(self, ctx: RankContext, case: Case, engine: Engine) -> None:
        self.ctx, self.case, self.engine = ctx, case, engine
        T, limit, H, K = case.tokens[ctx.rank], case.max_recv_rows, case.hidden, case.top_k
        assert limit is not None
        placed = {"dtype": case.dtype, "device": ctx.device}
        self.topk_idx = case.topk_idx(ctx.rank)
        self.x, self.out_grad = torch.zeros(T, H, **placed), torch.zeros(T, H, **placed)
        self.y, self.rows_grad = torch.zeros(limit, H, **placed), torch.zeros(limit, H, **placed)
        self.w = torch.zeros(T, K, device=ctx.device)
        self.row_w_grad = torch.zeros(limit, device=ctx.device)

    def step(self) -> tuple[RoutePlan, list[torch.Tensor | None]]:
        """Everything that a layer does with a plan; collective."""
        engine = self.engine
        plan = engine.plan(self.topk_idx)
        return plan, [
            *engine.dispatch(plan, self.x, self.w),
            *engine.combine(plan, self.y),
            *engine.dispatch(plan, self.out_grad),  # combine's backward
            *engine.combine(plan, self.rows_grad, self.row_w_grad),  # dispatch's
        ]

    def fill(self, number: int) -> None:
        """Make the inputs those of micro-batch `number`."""
        case, rank = dataclasses.replace(self.case, seed=number), self.ctx.rank
        self.topk_idx.copy_(case.topk_idx(rank))
        for salt, tensor in enumerate((self.x, self.y, self.out_grad, self.rows_grad)):
            tensor.copy_(self.rows(rank, len(tensor), number, salt))
        self.w.copy_(weights_of(rank, tuple(self.w.shape), number, self.ctx.device))
        self.row_w_grad.copy_(weights_of(rank, (len(self.row_w_grad),), -number, self.ctx.device))

    def rows(self, rank: int, num_rows: int, number: int, salt: int) -> torch.Tensor:
        case = self.case
        return rows_of(rank, num_rows, case.hidden, case.dtype, 10 * number + salt, case.device)

    def expected(self, number: int) -> tuple[Tables, list[torch.Tensor | None]]:
        """What the plan and the results of `step` must be for micro-batch `number`."""
        case, rank = dataclasses.replace(self.case, seed=number), self.ctx.rank
        limit, device, tokens = case.max_recv_rows, self.ctx.device, case.tokens
        assert isinstance(limit, int)
        ranks = range(case.num_ranks)
        topk_idx = [case.topk_idx(r) for r in ranks]
        name = self.engine.caps.name
        tables = Tables(name, topk_idx, case.num_experts, case.alignment, limit)
        x, out_grad = ([self.rows(r, tokens[r], number, salt) for r in ranks] for salt in (0, 2))
        y, rows_grad = ([self.rows(r, limit, number, salt) for r in ranks] for salt in (1, 3))
        w = [weights_of(r, (tokens[r], case.top_k), number, device) for r in ranks]
        row_w_grad = [weights_of(r, (limit,), -number, device) for r in ranks]
        return tables, [
            *tables.dispatch(rank, x, w),
            *tables.combine(rank, y),
            *tables.dispatch(rank, out_grad),
            *tables.combine(rank, rows_grad, row_w_grad),
        ]

    def check(self, plan: RoutePlan, results: list[torch.Tensor | None], number: int) -> int:
        """Compare with the oracle; return how many assignments it dropped for this rank."""
        tables, values = self.expected(number)
        rank = self.ctx.rank
        what = f"{self.case}, micro-batch {number}, rank {rank}"
        tables.assert_plan(plan, rank, what)
        for name, result, value in zip(RESULTS, results, values, strict=True):
            assert_same_bits(result, value, f"{what}: {name}")
        return int(tables.of_rank[rank].num_dropped)


Results = tuple[RoutePlan, list[torch.Tensor | None]]


def captured(layer: Layer) -> tuple[Callable[[], None], Results]:
    """A step as a graph: what replays it, and where it leaves its results."""
    graph = torch.cuda.CUDAGraph()
    # Meanwhile torch's own thread may ask how a collective is getting on.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = layer.step()
    return graph.replay, results


def replays_on_rank(
    ctx: RankContext, case: Case, engine_name: str, eager_between: bool
) -> tuple[str, int]:
    """Replay a step again and again; return the first difference and how much was dropped."""
    case = case.on(ctx.device)
    exact = dataclasses.replace(case, max_recv_rows=None)
    config = config_of(case, engine_name)
    if isinstance(case.max_recv_rows, str):
        config.max_tokens_per_rank = max(case.tokens)
        case = dataclasses.replace(case, max_recv_rows=rows_limit_of(case))
    difference, dropped = "", 0
    with (
        closing(create_engine(ctx.group, case.num_experts, config)) as engine,
        closing(create_engine(ctx.group, case.num_experts, config_of(exact, engine_name))) as other,
    ):
        layer = Layer(ctx, case, engine)
        layer.step()  # windows that grow cannot be captured
        torch.cuda.synchronize()
        replay, (plan, results) = captured(layer)
        num_replays = MOST_REPLAYS if case.name == CASE.name else NUM_REPLAYS
        for number in range(1, num_replays + 1):
            layer.fill(number)
            replay()
            if eager_between:
                between = other.plan(layer.topk_idx)
                other.dispatch(between, layer.x, layer.w)
            torch.cuda.synchronize()
            if difference:
                continue  # the other ranks go on
            try:
                dropped += layer.check(plan, results, number)
            except AssertionError as error:
                difference = str(error)
    return difference, dropped


@pytest.mark.parametrize("eager_between", [False, True], ids=["alone", "between-eager-calls"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_graphs_replayed_with_a_changed_routing(
    pool: RankPool, engine_name: str, case: Case, eager_between: bool
) -> None:
    """With another dispatcher such a layer hung in a CUDA graph (Megatron-Bridge 3517)."""
    assert "max_recv_rows" in caps_of(engine_name).options
    case = fitted(case, pool, engine_name)
    results = pool.run(replays_on_rank, case, engine_name, eager_between, ranks=case.num_ranks)
    differences = [difference for difference, _ in results if difference]
    assert not differences, "\n".join(differences)
    dropped = sum(count for _, count in results)
    assert (dropped > 0) == ("overflow" in case.name)


def bad_routing_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[tuple[str, bool]]:
    """An optimizer's steps after three replays; the second has a bad routing on rank 0.

    Returns:
        what each step raised, and whether it changed the weight.
    """
    case = case.on(ctx.device)
    weight = torch.nn.Parameter(torch.zeros(1, device=ctx.device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(step_check._check_step)
    steps = []
    config = config_of(case, engine_name)
    with closing(create_engine(ctx.group, case.num_experts, config)) as engine:
        layer = Layer(ctx, case, engine)
        layer.step()  # windows that grow cannot be captured
        torch.cuda.synchronize()
        replay, kept = captured(layer)
        for number in range(3):
            layer.fill(number)
            if number == 1 and ctx.rank == 0:
                layer.topk_idx[7, 1] = case.num_experts
            before = weight.item()
            replay()
            raised = ""
            try:
                optimizer.step()
            except InputError as error:
                raised = str(error)
            steps.append((raised, weight.item() != before))
        del kept
        layer.step()  # the group can go on
    return steps


def test_a_bad_routing_in_a_replay_reaches_no_weight(pool: RankPool, engine_name: str) -> None:
    """A replay makes no call that could ask whether a routing is bad: the optimizer's step does."""
    case = fitted(CASE, pool, engine_name)
    first, bad, last = zip(
        *pool.run(bad_routing_on_rank, case, engine_name, ranks=case.num_ranks), strict=True
    )
    assert set(first) == set(last) == {("", True)}
    ((text, has_stepped),) = set(bad)  # the same on all ranks
    assert "in an earlier plan (static mode), topk_idx of rank 0 named an index that is not" in text
    assert not has_stepped
