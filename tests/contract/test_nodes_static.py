"""Static mode over several nodes: no call waits, neither for a device nor for another host.

On a CPU, `reference` plays an engine inside the nodes that waits for nothing, and may read what it
likes; whatever `hierarchical` itself reads, or asks other hosts, is an error.  Other kinds of waits
show on GPUs: `NCCLEP_LOCAL_RANKS=1 pytest tests/gpu/test_gpu_static_mode.py
tests/gpu/test_graphs.py --backend nccl --engine hierarchical --ranks 2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import RankContext, RankPool
from run_case import calls, opened
from test_nodes import ENGINE, assert_all_steps, grid, possible_cases
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.engines.hierarchical import agreement as hierarchical_calls
from megatron_ncclep.engines.hierarchical import engine as hierarchical
from megatron_ncclep.engines.hierarchical.internode_routes import HierarchicalPlan
from megatron_ncclep.engines.reference.engine import CAPS, ReferenceEngine
from megatron_ncclep.errors import EpError, InputError, PeerError, RefusedError
from megatron_ncclep.ranks.all_to_all import AllToAll, PendingTransfers
from megatron_ncclep.ranks.group import EpGroup

pytestmark = [pytest.mark.needs_ranks(4), pytest.mark.ranks(4), pytest.mark.cpu_only]

# What brings a tensor's numbers to the host, or a size that depends on them.
METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "bincount", "masked_select", "unique")
METHODS += ("__bool__", "__int__", "__float__", "__index__", "__contains__")
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2")


class WaitedError(AssertionError):
    """A call waited."""


class NoMethodReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Far.is_on and getattr(func, "__name__", "") in METHODS:
            raise WaitedError(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class NoOperatorReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if Far.is_on and (name in OPERATORS or by_mask):
            raise WaitedError(f"aten.{name}")
        return func(*args, **(kwargs or {}))


class Far:
    """Whether calls count as work on a device far away, which the host cannot read."""

    is_on = False


class InsideWithoutWaits(ReferenceEngine):
    """May look at what it gets: it stands for kernels."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in ("plan", "dispatch", "combine"):
            setattr(self, name, near()(getattr(self, name)))


@contextmanager
def near() -> Iterator[None]:
    was, Far.is_on = Far.is_on, False
    try:
        yield
    finally:
        Far.is_on = was


@contextmanager
def far(group: EpGroup) -> Iterator[None]:
    """Whatever waits is an error: reading, agreeing, waiting on the host for an exchange."""
    finish = AllToAll.finish

    def finish_at_once(exchange: AllToAll, on_host: bool = True) -> torch.Tensor:
        if on_host and exchange._group is group:
            raise WaitedError(f"for {exchange._what}")
        with near():  # gloo brings it through the host
            return finish(exchange, on_host)

    def never(*args: Any) -> None:
        raise WaitedError("for other hosts")

    with pytest.MonkeyPatch.context() as patch, NoMethodReads(), NoOperatorReads():
        patch.setattr(AllToAll, "finish", finish_at_once)
        patch.setattr(group.hosts, "exchange", never)
        patch.setattr(Far, "is_on", True)
        yield


@contextmanager
def inside_that_waits_for_nothing(ctx: RankContext, local_ranks: int = 2) -> Iterator[None]:
    """A grid whose nodes have an engine that waits for nothing."""
    caps = dataclasses.replace(CAPS, captures_static=True)
    with grid(ctx, local_ranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(InsideWithoutWaits, "caps", caps)
        patch.setitem(hierarchical.INSIDE, "reference", InsideWithoutWaits)
        yield


@contextmanager
def static_engine(ctx: RankContext, **options: Any) -> Iterator[Engine]:
    """An engine for 8 experts over such a grid, in static mode."""
    config = EpConfig(engine=ENGINE, **options)
    with inside_that_waits_for_nothing(ctx), closing(create_engine(ctx.group, 8, config)) as engine:
        yield engine


def static_steps_on_rank(
    ctx: RankContext, local_ranks: int, cases: list[Case]
) -> list[list[torch.Tensor]]:
    """All steps, twice: hosts agree on the shapes the first time and do not wait the second."""
    with inside_that_waits_for_nothing(ctx, local_ranks):
        return [steps_on_rank(ctx, case) for case in cases]


def steps_on_rank(ctx: RankContext, case: Case) -> list[torch.Tensor]:
    # With a number of rows ranks may bring fewer tokens than at first.
    more = 0 if isinstance(case.max_recv_rows, str) else 3
    tokens = tuple(count + more for count in case.tokens)
    first = dataclasses.replace(case, seed=case.seed + 1, tokens=tokens)
    results: list[torch.Tensor] = []
    with opened(ctx, case, ENGINE) as (_, engine):
        for batch, quietly in ((first, near()), (case, far(EpGroup.of(ctx.group)))):
            with quietly:
                _, _, results = islice(calls(engine, batch, ctx.rank), 3)
    return results


def static_cases() -> list[Case]:
    few = Case("few", (7, 3, 0, 5), 8, 3, hidden=24, dtype=torch.bfloat16, max_recv_rows=8)
    even = dataclasses.replace(few, name="even", tokens=(6,) * 4, max_recv_rows="1.25x")
    contract = [case for case in possible_cases(4) if case.max_recv_rows is not None]
    return [*contract, few, even, dataclasses.replace(even, name="worst", max_recv_rows="worst")]


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_no_call_waits(pool: RankPool, monkeypatch: pytest.MonkeyPatch, local_ranks: int) -> None:
    monkeypatch.setenv("NCCLEP_LOCAL_RANKS", str(local_ranks))  # for the oracle
    cases = static_cases()
    assert_all_steps(cases, pool.run(static_steps_on_rank, local_ranks, cases, ranks=4))


def test_hosts_agree_on_whatever_is_new(ctx: RankContext) -> None:
    """What waits for other hosts, of calls that are like earlier ones but for one thing each.

    Sizes of messages follow from it: rows of bf16 on one rank and of fp32 on another would cross
    the network as numbers of the wrong kind, or not at all.
    """
    said = []
    assignments, x, w = torch.tensor([[0, 7]]), torch.ones(1, 16), torch.ones(1, 2)
    with static_engine(ctx, max_recv_rows="worst") as engine:
        plan = engine.plan(assignments)
        rows, _ = engine.dispatch(plan, x)
        engine.combine(plan, rows)
        each: dict[str, Callable[[], Any]] = {
            "the same plan": lambda: engine.plan(assignments + 0),
            "more tokens": lambda: engine.plan(assignments.repeat(2, 1)),
            "top-k": lambda: engine.plan(assignments[:, :1]),
            "the same dispatch": lambda: engine.dispatch(plan, x + 1),
            "dispatched dtype": lambda: engine.dispatch(plan, x.bfloat16()),
            "dispatched hidden size": lambda: engine.dispatch(plan, x.repeat(1, 2)),
            "dispatched weights": lambda: engine.dispatch(plan, x, w),
            "the same combine": lambda: engine.combine(plan, rows + 1),
            "combined dtype": lambda: engine.combine(plan, rows.bfloat16()),
        }
        with far(EpGroup.of(ctx.group)):
            for name, call in each.items():
                try:
                    call()
                except WaitedError as error:
                    said.append(f"{name}: {error}")
    names = ("more tokens", "top-k", "dispatched dtype", "dispatched hidden size")
    names += ("dispatched weights", "combined dtype")
    assert said == [f"{name}: for other hosts" for name in names], said


def test_batches_of_many_sizes_leave_nothing_behind(ctx: RankContext) -> None:
    """Each new number of tokens made another engine inside, and an entry that stayed."""
    batches = [torch.tensor([[0, 7]]).repeat(n, 1) for n in (1, 2, 3, 4)]
    with static_engine(ctx, max_recv_rows="1.5x") as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical_calls, "MOST_AGREED", 3)
        plans = [engine.plan(topk_idx) for topk_idx in batches]
        assert isinstance(plans[0], HierarchicalPlan)
        assert len({id(plan.inside.made_by) for plan in plans}) == 1  # type: ignore[attr-defined]
        with far(EpGroup.of(ctx.group)):
            engine.plan(batches[-1])
            with pytest.raises(WaitedError, match="for other hosts"):
                engine.plan(batches[0])
    assert [plan.num_rows for plan in plans] == [3, 6, 9, 12]


def test_no_host_is_asked_about_declared_tokens(ctx: RankContext) -> None:
    """Ranks bring any number of tokens up to the most, each another one; who brings more is told so
    without the others.
    """
    assignments = torch.tensor([[0, 7]])
    with static_engine(ctx, max_recv_rows="1.5x", max_tokens_per_rank=6) as engine:
        plans = [engine.plan(assignments)]
        rows, _ = engine.dispatch(plans[0], torch.ones(1, 16))
        engine.combine(plans[0], rows)
        with far(EpGroup.of(ctx.group)):
            for num_tokens in (6 - ctx.rank, 0, 6, ctx.rank):
                plans.append(engine.plan(assignments.repeat(num_tokens, 1)))
                rows, _ = engine.dispatch(plans[-1], torch.ones(num_tokens, 16))
                engine.combine(plans[-1], rows)
            with pytest.raises(RefusedError, match="topk_idx has 7 tokens, more than max_tokens"):
                engine.plan(assignments.repeat(7, 1))
    assert {plan.num_rows for plan in plans} == {18}


def test_all_nodes_are_told_of_dropped_rows_without_waiting(ctx: RankContext) -> None:
    """Of a plan in which no host agreed."""
    topk_idx = torch.tensor([[0, 1], [1, -1]])  # of each of four ranks: 12 assignments for rank 0
    with static_engine(ctx, max_recv_rows=4, on_overflow="raise") as engine:
        group = EpGroup.of(ctx.group)
        engine.plan(torch.full_like(topk_idx, -1))
        group.check()
        with far(group):
            engine.plan(topk_idx)
        text = r"with max_recv_rows=4, rank 0 needed 12 rows and had 4 \("
        with pytest.raises(EpError, match=text):
            group.check()


@pytest.mark.parametrize("assignments", [[[0, 8]], [[-2, 0]], [[3, 3]], [[6, 6]]], ids=str)
def test_all_nodes_are_told_of_a_bad_routing(
    ctx: RankContext, assignments: list[list[int]]
) -> None:
    """It crosses to all nodes, whose engine inside finds it on the device."""
    good = torch.tensor([[0, 7]])
    with static_engine(ctx, max_recv_rows=64) as engine:
        engine.plan(good)
        with pytest.raises(InputError) as caught:
            engine.plan(torch.tensor(assignments) if ctx.rank == 1 else good)
    node, text = ctx.rank // 2, str(caught.value)
    assert f"inside node {node}, whose ranks 0 to 1 are ranks {2 * node} to" in text, text
    assert "plan: rank 1: " in text, text  # by its local index, which its rail has


def test_a_rank_refuses_alone(ctx: RankContext) -> None:
    """What one rank says of its own wrong arguments, without asking the others."""
    said = []
    assignments, x = torch.tensor([[0, 7]]), torch.ones(1, 16)
    for wrong in (
        lambda engine, plan: engine.plan(assignments.short()),
        lambda engine, plan: engine.dispatch(plan, torch.ones(2, 16)),
        lambda engine, plan: engine.dispatch(RoutePlan(1, 1, 2, engine, 64, assignments), x),
    ):
        with static_engine(ctx, max_recv_rows=64) as engine:
            plan = engine.plan(assignments)
            engine.dispatch(plan, x)
            with far(EpGroup.of(ctx.group)):
                # The second one is as it should be, and comes too late.
                for call in (lambda: wrong(engine, plan), lambda: engine.plan(assignments)):  # noqa: B023
                    with pytest.raises(RefusedError) as caught:
                        call()
                    said.append(str(caught.value))
    assert [said[0], said[2], said[4]] == [said[1], said[3], said[5]]
    assert f"plan: rank {ctx.rank}: topk_idx is torch.int16" in said[0]
    assert f"dispatch: rank {ctx.rank}: x has shape [2, 16]" in said[2]
    assert f"dispatch: rank {ctx.rank}: the plan is a RoutePlan" in said[4]


# --- work that no host waits for -----------------------------------------------------------------


class Event:
    """A CUDA event that happens after some looks."""

    looks = 0

    def record(self) -> None:
        self.left = Event.looks

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    ("looks", "refusals", "error", "text"),
    [
        (3, {}, None, ""),
        (10**9, {}, PeerError, "rank 0 of 2: dispatch between nodes was not over within"),
        (10**9, {1: "dispatch: rank 1: x has"}, RefusedError, "dispatch: rank 1: x has"),
    ],
)
def test_what_crosses_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
    looks: int,
    refusals: dict[int, str],
    error: type[EpError] | None,
    text: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "looks", looks)
    group: Any = SimpleNamespace(
        rank=0,
        size=2,
        device=torch.device("cuda"),
        hosts=SimpleNamespace(link=SimpleNamespace(refusal=lambda rank: refusals.get(rank, ""))),
    )
    pending_transfers = PendingTransfers(group)
    pending_transfers.check()  # nothing has crossed
    pending_transfers.record("dispatch between nodes", 0.05)
    if error is None:
        pending_transfers.check()
        return
    with pytest.raises(error, match=text):
        pending_transfers.check()
