"""Run by test_pool.py: a test whose ranks are not fit for another one, and another one."""

from __future__ import annotations

from megatron_ncclep.errors import PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext, RankPool


def give_up(ctx: RankContext) -> str:
    """What rank 0 says, which catches its error: the pool has not heard of any."""
    try:
        if ctx.rank == 0:
            EpGroup.of(ctx.group).exchange(b"?", "a call that rank 1 does not make", 1e-3)
    except PeerError as error:
        return f"PeerError: {error}"
    return ""


def meet(ctx: RankContext) -> bytes:
    return EpGroup.of(ctx.group).exchange(bytes([ctx.rank]), "a call", 60.0)


def test_that_fails(pool: RankPool) -> None:
    assert pool.run(give_up, ranks=2) == ["", ""]


def test_of_the_same_ranks(pool: RankPool) -> None:
    assert pool.run(meet, ranks=2) == [bytes([0, 1])] * 2
