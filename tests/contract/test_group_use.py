"""Engines and groups that a rank cannot use, or uses late or for other calls than other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext
from run_case import own_group
from test_errors import NUM_EXPERTS, config, rows, topk, until_checked
from timeouts import patient

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.errors import (
    GroupClosedError,
    InputError,
    PeerError,
    RefusedError,
    RowsDroppedError,
)
from megatron_ncclep.ranks.group import EpGroup

pytestmark = pytest.mark.needs_ranks(2)


@pytest.mark.ranks(2)
def test_a_closed_engine_says_so(ctx: RankContext, engine_name: str) -> None:
    engine = create_engine(ctx.group, NUM_EXPERTS, config(engine_name))
    plan = engine.plan(topk(ctx))
    engine.close()
    engine.close()
    for call in (
        lambda: engine.plan(topk(ctx)),
        lambda: engine.dispatch(plan, rows(ctx)),
        lambda: engine.combine(plan, rows(ctx, plan.num_rows)),
    ):
        with pytest.raises(GroupClosedError, match="create a new one"):
            call()


def test_a_destroyed_process_group_says_so(ctx: RankContext, engine_name: str) -> None:
    group = dist.new_group(list(range(ctx.num_ranks)))
    num_experts = 4 * ctx.num_ranks
    engine = create_engine(group, num_experts, config(engine_name))
    plan = engine.plan(topk(ctx))
    dispatched, _ = engine.dispatch(plan, rows(ctx))  # whatever it needs is there from now on
    dist.destroy_process_group(group)
    for call in (
        lambda: engine.plan(topk(ctx)),
        lambda: engine.dispatch(plan, rows(ctx)),
        lambda: engine.combine(plan, dispatched),
        lambda: create_engine(group, num_experts, config(engine_name)),
    ):
        with pytest.raises(GroupClosedError, match="destroyed"):
            call()


def test_a_rank_outside_the_group_says_so(ctx: RankContext) -> None:
    """Whatever the engine: it is found before one is chosen."""
    num_members = ctx.num_ranks - 1
    group = dist.new_group(list(range(num_members)))
    if ctx.rank < num_members:
        assert create_engine(group, 4 * num_members, config()).caps.name == "reference"
        return
    with pytest.raises(InputError, match="not a member"):
        create_engine(group, 4 * num_members, config())


@pytest.mark.ranks(2)
def test_ranks_in_different_calls_are_told(ctx: RankContext, engine_name: str) -> None:
    with closing(create_engine(ctx.group, NUM_EXPERTS, config(engine_name))) as engine:
        plan = engine.plan(topk(ctx))
        call, num_rows = (engine.combine, plan.num_rows) if ctx.rank == 0 else (engine.dispatch, 3)
        with pytest.raises(PeerError) as caught:
            until_checked(lambda: call(plan, rows(ctx, num_rows)))
        assert "rank 0 is in combine" in str(caught.value)
        assert "rank 1 is in dispatch" in str(caught.value)
    megatron_ncclep.close(ctx.group)


@pytest.mark.cpu_only
@pytest.mark.ranks(2)
def test_a_failed_group_says_how_to_go_on(ctx: RankContext) -> None:
    """After ranks had been in different calls, `create_engine` waited ten minutes for a rank that
    did something else, and nothing said how to go on.
    """
    engine = create_engine(ctx.group, NUM_EXPERTS, EpConfig(engine="reference"))
    plan = engine.plan(topk(ctx))

    def create() -> Engine:
        return create_engine(ctx.group, NUM_EXPERTS, EpConfig(engine="reference"))

    def combine_on_one() -> object:
        # The other one's experts have failed, and it goes on with the next thing.
        return create() if ctx.rank else engine.combine(plan, rows(ctx, plan.num_rows))

    with pytest.raises(PeerError, match=r"different calls.*, call megatron_ncclep\.close"):
        combine_on_one()
    if ctx.rank == 0:  # the other one does not come; nor is it waited for
        for call in (create, lambda: engine.plan(topk(ctx))):
            with pytest.raises(PeerError, match=r"cannot be agreed on.* different calls.*\.close"):
                call()
    engine.close()
    megatron_ncclep.close(ctx.group)
    with closing(create_engine(ctx.group, NUM_EXPERTS, config())) as again:
        assert again.plan(topk(ctx)).num_tokens == 3


@pytest.mark.cpu_only
@pytest.mark.parametrize("shares_memory", [True, False])
def test_an_engine_of_an_evaluation(ctx: RankContext, shares_memory: bool) -> None:
    """An evaluation in inference mode after which the limit followed the load made tensors that the
    next training step could not write to, and so did its first exchange between nodes.
    """
    options = EpConfig(engine="reference", max_recv_rows=16, on_overflow="raise")
    with own_group(ctx, NCCLEP_HOST_EXCHANGE=str(int(shares_memory))) as process_group:
        with torch.inference_mode():
            engine = create_engine(process_group, NUM_EXPERTS, options)
            EpGroup.of(process_group).hosts.gather(torch.zeros(9999), "a long message", 20.0)
        engine.plan(topk(ctx).repeat(8, 1))
        with pytest.raises(RowsDroppedError):
            EpGroup.of(process_group).check()


@pytest.mark.cpu_only
def test_beside_a_default_device(ctx: RankContext) -> None:
    """A model that is made without memory (`with torch.device("meta")`) is filled later, but its
    engine needs numbers now: it was "Cannot copy out of meta tensor".
    """
    with own_group(ctx, NCCLEP_LOCAL_RANKS=str(ctx.num_ranks // 2)) as process_group:
        with torch.device("meta"):
            engine = create_engine(process_group, 2 * NUM_EXPERTS, EpConfig(engine="hierarchical"))
        assert engine.plan(topk(ctx)).num_tokens == len(topk(ctx))


@pytest.mark.cpu_only
@pytest.mark.parametrize("shares_memory", [True, False])
def test_an_old_refusal_says_nothing_of_a_new_call(ctx: RankContext, shares_memory: bool) -> None:
    """A rank that has refused a call still comes to close the group: if it does not, that is the
    error, and a group that is made after both begins without either.
    """
    with own_group(ctx, NCCLEP_HOST_EXCHANGE=str(int(shares_memory))) as process_group:
        for _ in range(2):
            group, deadline_s = EpGroup.of(process_group), patient(20.0)
            group.timeout_s = deadline_s
            group.hosts.agree("open", {}, None, deadline_s)
            if ctx.rank == 1:
                group.hosts.refuse("dispatch: rank 1: x is wrong")
            else:
                group.hosts.enter()
                with pytest.raises(PeerError, match="in close, call 3 "):
                    group.hosts.agree("close", {}, None, 0.2)
            dist.barrier(ctx.group)
            megatron_ncclep.close(process_group)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("shares_memory", "num_more"), [(True, 0), (False, 0), (False, 3)])
def test_a_refusal_reaches_ranks_that_want_to_agree(
    ctx: RankContext, shares_memory: bool, num_more: int
) -> None:
    """Rank 1 refuses a call on which the others want to agree, `num_more` calls after it.

    Over torch they hear of it when the rank closes its engine, and once were left without a word
    of it, in different calls.
    """
    deadline_s, refusal = patient(20.0), ""
    with own_group(ctx, NCCLEP_HOST_EXCHANGE=str(int(shares_memory))) as process_group:
        group = EpGroup.of(process_group)
        group.hosts.agree("open", {}, None, deadline_s)
        if ctx.rank == 1:
            group.hosts.refuse("dispatch: rank 1: x is wrong")
        else:
            for _ in range(num_more):
                group.hosts.enter()
            with pytest.raises(RefusedError) as caught:
                group.hosts.agree("dispatch", {}, None, deadline_s)
            refusal = str(caught.value)
        call = group.hosts.agree("close", {}, None, deadline_s).call
        group.hosts.forget_refusal()
        assert group.hosts.agree("open", {"num_experts": 8}, None, deadline_s).call == call + 1
    said = "" if ctx.rank == 1 else "dispatch: rank 1: x is wrong"
    assert (refusal, call) == (said, 3 + num_more)


# --- the first step -------------------------------------------------------------------------------

# Of an ordinary step, of the first one, and how late a rank is in it.
TIMEOUT_S, FIRST_S, LATE_S = 0.2, 120.0, 0.5
TOPK = torch.tensor([[0, 1]])


def plan_of(engine: Engine) -> Callable[[], object]:
    return lambda: engine.plan(TOPK)


def low_latency_of(engine: Engine) -> Callable[[], object]:
    calls = create_low_latency(engine, max_tokens=1, hidden=8, top_k=2)
    x, w = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 2)

    def pair() -> None:
        calls.combine(calls.dispatch(x, TOPK, w).rows)

    return pair


@pytest.mark.cpu_only  # hosts wait; for devices see tests/native/test_native_group.py
@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "torch"])
@pytest.mark.parametrize("make", [plan_of, low_latency_of])
def test_a_rank_may_be_late_in_the_first_step(
    ctx: RankContext, make: Callable[[Engine], Callable[[], object]], shares_memory: bool
) -> None:
    """Because it compiles: with 60 s, the others took it for dead.  Rank 1 is late in those of two
    engines; after them rank 0 gives up.
    """
    config = EpConfig(engine="reference", timeout_s=TIMEOUT_S, first_timeout_s=FIRST_S)
    with own_group(ctx, NCCLEP_HOST_EXCHANGE=str(int(shares_memory))) as process_group:
        group = EpGroup.of(process_group)
        for _ in range(2):
            call = make(create_engine(process_group, 2 * ctx.num_ranks, config))
            group.check()  # of a model that has not begun
            dist.barrier(ctx.group)
            if ctx.rank == 1:
                time.sleep(LATE_S)  # longer than rank 0 waits, were this not the first step
            call()
            dist.barrier(ctx.group)
            group.check()
        if ctx.rank == 0:
            with pytest.raises(PeerError, match=rf"\(deadline {TIMEOUT_S:g} s\)"):
                call()
        dist.barrier(ctx.group)
