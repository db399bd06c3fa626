"""RankPool: one process imports, its forks are the ranks, and nothing is left of them.

And LocalRanks, which are processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from fixtures import closed
from rank_pool import RankContext, RankError, RankPool
from timeouts import patient

from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.launch import LocalRanks

PREPARED: list[int] = []
# Far longer than any wait that is meant to end.
LONG_S = patient(60.0)


def prepare() -> None:
    PREPARED.append(os.getpid())


def whereabouts(ctx: RankContext) -> tuple[int, int, list[int]]:
    return os.getpid(), os.getppid(), PREPARED


def hang(ctx: RankContext) -> None:
    while ctx.rank == 1:
        time.sleep(1)


def fail(ctx: RankContext) -> None:
    """Rank 0 waits in torch's barrier, for as long as torch lets it."""
    if ctx.rank == 1:
        raise ZeroDivisionError("a bug")
    dist.barrier(ctx.group)


def give_up(ctx: RankContext) -> None:
    if ctx.rank == 0:
        EpGroup.of(ctx.group).hosts.exchange(b"?", "a call that rank 1 does not make", 1e-3)


def meet(ctx: RankContext) -> bytes:
    return EpGroup.of(ctx.group).hosts.exchange(bytes([ctx.rank]), "a call", 60.0)


def listening(process: int) -> set[str]:
    """The addresses on which a process accepts connections."""
    found = psutil.Process(process).net_connections("tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def own_addresses(ctx: RankContext) -> set[str]:
    return listening(os.getpid())


def no_rank_starts() -> None:
    raise ImportError("no module for ranks")


pool = closed(lambda: RankPool(2, prepare=prepare), "module")


def test_ranks_are_forks_of_one_process(pool: RankPool) -> None:
    (first, parent, prepared), (second, same, _) = pool.run(whereabouts)
    assert first != second
    assert prepared == [parent] == [same]
    pool.close()
    assert not [pid for pid in (first, second, parent) if psutil.pid_exists(pid)]


def test_only_this_machine_reaches_the_ranks(pool: RankPool) -> None:
    """The store listened on every interface, and gloo on the host name's address: who reached them
    could be a rank, whose objects the others unpickle.
    """
    of_ranks = pool.run(own_addresses)
    assert listening(os.getpid()).union(*of_ranks) == {"127.0.0.1"}


def test_what_keeps_ranks_from_starting_is_told() -> None:
    """With torch 2.14 no gloo group could be made: the pool said only that its ranks had died."""
    for broken, told in (
        (RankPool(2, prepare=no_rank_starts), "ImportError: no module for ranks"),
        (RankPool(2, backend="no-such"), "(?i)backend.*no-such"),
    ):
        with contextlib.closing(broken), pytest.raises(RankError, match=told):
            broken.run(whereabouts, timeout=LONG_S)


@pytest.mark.parametrize(
    ("mistake", "timeout", "told"),
    [
        (hang, 2, "rank 1 did not answer within 2 s"),
        # It raises while the others wait in a collective, for minutes: that is not a hang.
        (fail, LONG_S, r"rank 0 did not answer within 1\.5 s after rank 1 had failed"
         r"(?s:.*)--- rank 1 ---(?s:.*)ZeroDivisionError: a bug"),
    ],
)  # fmt: skip
def test_a_rank_that_goes_wrong_is_told_and_costs_all_processes(
    pool: RankPool, mistake: Callable[[RankContext], None], timeout: float, told: str, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("megatron_ncclep.ranks.launch.GRACE_S", 1.5)
    if mistake is hang:
        pool.close()  # new processes write to where `capfd` reads
    before = pool.run(whereabouts)
    with pytest.raises(RankError, match=told) as caught:
        pool.run(mistake, timeout=timeout)
    assert "--- rank 0 ---" not in str(caught.value)
    if mistake is hang:
        assert 'test_pool.py", line' in capfd.readouterr().err
    after = pool.run(whereabouts)
    assert {pid for pid, *_ in before}.isdisjoint(pid for pid, *_ in after)
    assert {parent for _, parent, _ in before} == {parent for _, parent, _ in after}
    assert not [pid for pid, *_ in before if psutil.pid_exists(pid)]


def test_a_group_that_gave_up_or_a_job_that_was_interrupted_is_not_used_again(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every further call of such a group fails; late answers would be taken for the next job's."""
    with pytest.raises(RankError, match="PeerError: rank 0 of 2: no answer from the other ranks"):
        pool.run(give_up)
    assert pool.run(meet) == [bytes([0, 1])] * 2
    with monkeypatch.context() as patch:
        patch.setattr("megatron_ncclep.ranks.launch.wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.run(whereabouts)
    assert pool.run(meet) == [bytes([0, 1])] * 2


# --- ranks of `ncclep bench` and `ncclep doctor` --------------------------------------------------


def tell_and_fail(ctx: RankContext, send: Callable[[Any], None]) -> None:
    """Send who this is; then rank 0 hangs, rank 1 raises and rank 2 dies."""
    total = [None] * ctx.num_ranks
    dist.all_gather_object(total, os.getpid(), group=ctx.group)
    send((ctx.rank, ctx.device, total))
    if ctx.rank == 0:
        time.sleep(2 * LONG_S)
    if ctx.rank == 1:
        raise ZeroDivisionError("a bug")
    os._exit(3)


def test_ranks_answer_until_one_fails_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    grace_s = patient(5.0)
    monkeypatch.setattr("megatron_ncclep.ranks.launch.GRACE_S", grace_s)
    told = (
        rf"rank 2 died\nrank 0 did not answer within {grace_s:g} s after rank [12] had failed\n"
        r"--- rank 1 ---\n(?s:.*)ZeroDivisionError: a bug"
    )
    with LocalRanks(3, "gloo", tell_and_fail) as ranks:
        received = ranks.receive(LONG_S)
        assert [each[:2] for each in received] == [(0, "cpu"), (1, "cpu"), (2, "cpu")]
        with pytest.raises(RankError, match=told):
            ranks.receive(LONG_S)
    assert not [pid for pid in received[0][2] if psutil.pid_exists(pid)]
