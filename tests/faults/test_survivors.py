"""Faults that processes survive: what still works afterwards, exactly, and what says it cannot.

Every fault has a process group of its own, in processes that live on.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from contract_cases import deadline_s
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.errors import GroupClosedError, PeerError
from megatron_ncclep.ranks.group import EpGroup

pytestmark = [pytest.mark.needs_ranks(2)]

# Seconds that a rank waits for one that does not come.
DEADLINE_S = 1.0
HIDDEN = 64
# A child that takes itself for a rank waits for the others, whose parents wait for it.
FORK_S = 60


class Member:
    """This rank in a group of its own, where every token has an expert on every rank."""

    def __init__(self, ctx: RankContext, engine_name: str, ranks: list[int]) -> None:
        self.device, self.ranks, self.engine_name = ctx.device, ranks, engine_name
        self.group = dist.new_group(ranks)
        if ctx.rank in ranks:
            self.rank = ranks.index(ctx.rank)
            self.engine = self.new_engine()

    def new_engine(self, timeout_s: float | None = None) -> Engine:
        timeout_s = timeout_s or deadline_s(self.engine_name, self.device)
        config = EpConfig(engine=self.engine_name, timeout_s=timeout_s)
        return create_engine(self.group, 4 * len(self.ranks), config)

    def plan(self) -> RoutePlan:
        """As many tokens as the rank's number, and one."""
        experts = 4 * torch.arange(len(self.ranks), device=self.device)
        return self.engine.plan(experts.repeat(self.rank + 1, 1))

    def check(self, plan: RoutePlan, number: int) -> None:
        """Dispatch and combine: every row comes back as many times as there are ranks, exactly."""
        x = torch.arange(HIDDEN, device=self.device) + 1000.0 * self.rank + number
        x = x.repeat(self.rank + 1, 1)
        rows, _ = self.engine.dispatch(plan, x)
        out, _ = self.engine.combine(plan, rows)
        assert torch.equal(out, len(self.ranks) * x), (self.ranks, number)


@contextmanager
def member(
    ctx: RankContext, engine_name: str, ranks: list[int] | None = None, fails: bool = False
) -> Iterator[Member]:
    """A member of a group that ends with it; one that `fails` cannot close what it shares."""
    member = Member(ctx, engine_name, ranks or list(range(ctx.num_ranks)))
    yield member
    if ctx.rank in member.ranks:
        if not fails:
            EpGroup.of(member.group).close()
        dist.destroy_process_group(member.group)


# CUDA cannot be used in a forked process at all, and says so itself.
@pytest.mark.cpu_only
@pytest.mark.limit_s(FORK_S)
def test_a_forked_process_is_no_rank(ctx: RankContext, engine_name: str) -> None:
    """It would write to the rank's place in shared memory, or wait in vain for gloo's threads.

    A process that loads data is forked from a rank, say, and inherits all of it.
    """
    with member(ctx, engine_name) as me:
        plan = me.plan()
        calls: list[Callable[[], object]] = [me.plan, lambda: me.check(plan, 1), me.new_engine]
        read, write = os.pipe()
        # A process group of an earlier test that only a cycle holds would be destroyed in the
        # child, and wait there for gloo's threads, which are not forked.
        gc.collect()
        child = os.fork()
        if child == 0:
            try:
                for call in calls:
                    text = "nothing"
                    try:
                        call()
                    except GroupClosedError as error:
                        text = str(error)
                    os.write(write, f"{text}\n".encode())
                EpGroup.of(me.group).close()
                del me, plan, calls
                gc.collect()
                os.write(write, b"the end\n")
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = pipe.read()
        assert os.waitpid(child, 0) == (child, 0)
        # What the child closed and took down is still whole here.
        me.check(plan, 2)
        me.check(me.plan(), 3)
    *texts, end = told.splitlines()
    assert end == "the end", told
    assert len(texts) == 3, told
    whose = f"forked from process {os.getpid()}, which is rank {ctx.rank} of {ctx.num_ranks}"
    assert all(whose in text for text in texts), told


def test_two_groups_of_one_rank(ctx: RankContext, engine_name: str) -> None:
    """Plans of both are alive, calls alternate; ranks that differ in the order of them end one
    group.  The other one still works, and so does a new one of the same ranks.
    """
    last = ctx.num_ranks - 1
    pair_of = [last - 1, last]
    with (
        member(ctx, engine_name) as everyone,
        member(ctx, engine_name, pair_of, fails=True) as pair,
    ):
        mine = [everyone] if ctx.rank < last - 1 else [everyone, pair]
        plans = [each.plan() for each in mine]
        for number in range(3):
            for each, plan in zip(mine, plans, strict=True):
                each.check(plan, number)
        if ctx.rank < last - 1:
            everyone.check(plans[0], 4)
        else:
            # The pair in the wrong order: one waits in the pair's call, the other in everyone's.
            pair.engine, waits_first = pair.new_engine(DEADLINE_S), ctx.rank == last
            if not waits_first:  # it does not come before the other has given up
                everyone.check(plans[0], 4)
            with pytest.raises(PeerError) as caught:
                pair.plan()
            if waits_first:
                everyone.check(plans[0], 4)
            # Every further call of the pair's says so at once, and the other group still works.
            with pytest.raises(PeerError, match="in an earlier call"):
                pair.plan()
            text = str(caught.value)
            assert f"rank {int(waits_first)} of 2: no answer from the other ranks" in text
            assert ("rank 0 did not come" if waits_first else "rank 1 gave up") in text
            assert waits_first or "in plan, call" in text
    with member(ctx, engine_name, pair_of) as another:
        if ctx.rank in pair_of:
            another.check(another.plan(), 5)
