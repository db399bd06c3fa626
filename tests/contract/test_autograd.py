"""Gradients, and the schedules that training really has: plans alive together, recompute."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from compare import assert_same_bits
from contract_cases import config_of, for_engine
from run_case import caps_of, fitted, most_ranks, opened, run_case

from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.reference.engine import ReferenceEngine
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext, RankPool
from megatron_ncclep.testing.cases import Case

CASES = [
    Case("dropless", (9, 5, 12, 1), 8, 3, 5, torch.float64),
    Case("masked-and-padded", (7, 0, 4), 6, 2, 3, torch.float64, alignment=16, dropped=0.3),
    Case("overflow", (14, 9), 4, 2, 4, torch.float64, max_recv_rows=12),
    Case("one-rank", (8,), 4, 4, 3, torch.float64),
]
by_name = pytest.mark.parametrize("case", CASES, ids=str)


def compare_gradients_on_rank(ctx: RankContext, case: Case, engine_name: str) -> None:
    """Compare analytic and numeric gradients of sum over ranks of loss(combine(experts(dispatch))).

    One input of one rank is moved at a time, while every call is collective; so all ranks walk
    through all ranks' inputs together, and the loss is the sum over ranks.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, plan.num_tokens, salt=2).requires_grad_()
        w = case.weights(ctx.rank).requires_grad_()

        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            rows, row_w = dispatch(engine, plan, x, w)
            index = torch.arange(plan.num_rows, dtype=x.dtype, device=x.device)[:, None]
            experts = torch.sin(rows * (1 + 0.1 * index)) * row_w[:, None]
            out = combine(engine, plan, experts)
            return (out * torch.cos(out)).sum()

        loss(x, w).backward()
        step = 1e-6
        for source, name in itertools.product(range(ctx.num_ranks), "xw"):
            inputs = {"x": x, "w": w}
            size = torch.tensor([inputs[name].numel()], device=ctx.device)
            torch.distributed.broadcast(size, source, group=ctx.group)
            for element in range(int(size)):
                values = []
                for sign in (1, -1):
                    moved = {key: value.detach().clone() for key, value in inputs.items()}
                    if ctx.rank == source:
                        moved[name].view(-1)[element] += sign * step
                    total = loss(**moved).reshape(1)
                    torch.distributed.all_reduce(total, group=ctx.group)
                    values.append(total.item())
                if ctx.rank == source:
                    numeric = (values[0] - values[1]) / (2 * step)
                    analytic = inputs[name].grad.view(-1)[element].item()
                    # Central differences in fp64: error ~ step^2 + 1e-16 * |loss| / step ~ 1e-8.
                    assert abs(numeric - analytic) < 1e-6 * (1 + abs(analytic)), (
                        f"d loss / d {name}[{element}]: {analytic}, numerically {numeric}"
                    )


@by_name
def test_gradients_are_the_numeric_ones(pool: RankPool, engine_name: str, case: Case) -> None:
    """Differences need fp64; an engine without it refuses, and is held to the reference below."""
    small = dataclasses.replace(
        case, tokens=tuple(t // 3 for t in case.tokens), hidden=2, fixed_payload=True
    )
    run_case(pool, compare_gradients_on_rank, fitted(small, pool, engine_name), engine_name)


# Of a step.
RESULTS = ("out", "x.grad", "w.grad")


class Step:
    """Forward and backward of one micro-batch, which may be far apart."""

    def __init__(self, ctx: RankContext, engine: Engine, case: Case) -> None:
        self.engine = engine
        self.plan = engine.plan(case.topk_idx(ctx.rank))
        self.x = case.rows(ctx.rank, case.tokens[ctx.rank], salt=2).requires_grad_()
        self.w = case.weights(ctx.rank).requires_grad_()
        rows, row_w = dispatch(engine, self.plan, self.x, self.w)
        self.out = combine(engine, self.plan, torch.tanh(rows) * row_w[:, None])

    def backward(self) -> list[torch.Tensor]:
        self.out.backward(torch.cos(self.out.detach()))
        return [self.out.detach(), self.x.grad, self.w.grad]


def step_of_both(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What one step gives with the engine, and with the reference engine and its reduction."""
    with opened(ctx, case, engine_name) as (case, engine):
        mine = Step(ctx, engine, case).backward()
        grid = getattr(engine, "nodes", None)  # where the order of rows depends on it
    reduction = caps_of(engine_name).reduction
    reference = ReferenceEngine(
        EpGroup.of(ctx.group), case.num_experts, config_of(case), reduction, grid
    )
    return mine, Step(ctx, reference, case).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_are_the_reference_engines(
    pool: RankPool, engine_name: str, dtype: torch.dtype
) -> None:
    """For an engine that does not move fp64; the numeric gradients are checked in fp64 only."""
    case = Case("gradients", (25, 12, 0, 31), 16, 4, dtype=dtype, alignment=16, dropped=0.2)
    results = run_case(pool, step_of_both, fitted(case, pool, engine_name), engine_name)
    for rank, (mine, expected) in enumerate(results or []):
        for what, a, b in zip(RESULTS, mine, expected, strict=True):
            assert_same_bits(a, b, f"rank {rank}, {what}")


def schedule_on_rank(ctx: RankContext, order: str, engine_name: str) -> list[list[torch.Tensor]]:
    """Run e.g. "F0 F1 B0 F2 B1 B2" over two layers' engines; return each micro-batch's results."""
    cases = [
        Case("mb0", (9, 4, 7), 6, 2, hidden=8, device=ctx.device),
        # Another layer: other shapes, also where few are tested (see `for_engine`).
        Case("mb1", (3, 11, 0), 24, 3, hidden=20, alignment=16, device=ctx.device),
        Case("mb2", (5, 5, 5), 6, 2, hidden=8, seed=1, device=ctx.device),
    ]
    cases = [for_engine(c.on_at_most(ctx.num_ranks), caps_of(engine_name)) for c in cases]
    assert cases[0].num_experts != cases[1].num_experts
    steps: dict[int, Step] = {}
    results: dict[int, list[torch.Tensor]] = {}
    with (
        opened(ctx, cases[0], engine_name) as (_, first),
        opened(ctx, cases[1], engine_name) as (_, second),
    ):
        engines = [first, second, first]
        for action in order.split():
            i = int(action[1])
            if action[0] == "F":
                steps[i] = Step(ctx, engines[i], cases[i])
            else:
                results[i] = steps.pop(i).backward()
    return [results[i] for i in sorted(results)]


def test_plans_alive_together_do_not_disturb_each_other(pool: RankPool, engine_name: str) -> None:
    ranks = most_ranks(engine_name, min(3, pool.size))
    alone = pool.run(schedule_on_rank, "F0 B0 F1 B1 F2 B2", engine_name, ranks=ranks)
    for order in ("F0 F1 B0 F2 B1 B2", "F0 F1 F2 B2 B0 B1"):
        together = pool.run(schedule_on_rank, order, engine_name, ranks=ranks)
        for rank, i in itertools.product(range(ranks), range(3)):
            for what, a, b in zip(RESULTS, together[rank][i], alone[rank][i], strict=True):
                assert_same_bits(a, b, f"{order}: rank {rank}, micro-batch {i}, {what}")


def recompute_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[torch.Tensor]:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, plan.num_tokens, salt=2)
        with torch.no_grad():
            first = dispatch(engine, plan, x, case.weights(ctx.rank))
            engine.plan(case.topk_idx(ctx.rank).flip(0))  # another micro-batch comes between
        again = dispatch(engine, plan, x.requires_grad_(), case.weights(ctx.rank).requires_grad_())
        return [*first, *again]


@by_name
def test_dispatching_again_from_a_saved_plan(pool: RankPool, engine_name: str, case: Case) -> None:
    results = run_case(pool, recompute_on_rank, fitted(case, pool, engine_name), engine_name)
    for rank, (rows, w, rows2, w2) in enumerate(results or []):
        assert_same_bits(rows2, rows, f"rows of rank {rank}")
        assert_same_bits(w2, w, f"weights of rank {rank}")


def double_weights_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[torch.dtype, ...]:
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, plan.num_tokens, salt=2).requires_grad_()
        w = case.weights(ctx.rank).double().requires_grad_()
        rows, row_w = dispatch(engine, plan, x, w)
        combine(engine, plan, rows * row_w[:, None].float()).sum().backward()
    expected = x.detach().sum(dim=1, keepdim=True).expand(-1, case.top_k)
    # One fp32 sum of at most 64 values in another order.
    assert torch.allclose(w.grad.float(), expected, rtol=1e-5)
    return row_w.dtype, w.grad.dtype


def test_fp64_weights_come_back_as_fp64(pool: RankPool, engine_name: str) -> None:
    case = fitted(Case("fp64-probabilities", (4, 3)), pool, engine_name)
    for dtypes in run_case(pool, double_weights_on_rank, case, engine_name) or []:
        assert dtypes == (torch.float64, torch.float64)
