"""LocalRanks: what ranks send, how their failures are told, and that nothing is left of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from timeouts import patient

from megatron_ncclep.ranks.launch import LocalRanks, RankContext, RankError

LONG_S = patient(60.0)


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
    monkeypatch.setattr("megatron_ncclep.ranks.launch.GRACE_S", 1.0)
    told = (
        r"rank 2 died\nrank 0 did not answer within 1 s after rank [12] had failed\n"
        r"--- rank 1 ---\n(?s:.*)ZeroDivisionError: a bug"
    )
    with LocalRanks(3, "gloo", tell_and_fail) as ranks:
        received = ranks.receive(LONG_S)
        assert [each[:2] for each in received] == [(0, "cpu"), (1, "cpu"), (2, "cpu")]
        with pytest.raises(RankError, match=told):
            ranks.receive(LONG_S)
    assert not [pid for pid in received[0][2] if psutil.pid_exists(pid)]
