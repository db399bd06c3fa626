"""LocalRanks: what ranks send, and how their failures are told."""

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


def tell(ctx: RankContext, send: Callable[[Any], None], mistake: str) -> None:
    """Send who this is, and then do what `mistake` says on rank 1."""
    total = [None] * ctx.num_ranks
    dist.all_gather_object(total, os.getpid(), group=ctx.group)
    send((ctx.rank, ctx.device, total))
    if ctx.rank == 1 and mistake == "raise":
        raise ZeroDivisionError("a bug")
    if ctx.rank == 1 and mistake == "die":
        os._exit(3)
    while ctx.rank == 0 and mistake != "raise":
        time.sleep(1)
    send("done")


def do_not_start() -> None:
    raise ImportError("no module for ranks")


@pytest.mark.parametrize(
    ("mistake", "told"), [("raise", "rank 1 ---\n(?s:.*)ZeroDivisionError: a bug"),
                          ("die", "rank 1 died\nrank 0 did not answer within 1 s after rank 1")]
)  # fmt: skip
def test_ranks_answer_until_one_fails_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, mistake: str, told: str
) -> None:
    monkeypatch.setattr("megatron_ncclep.ranks.launch.GRACE_S", 1.0)
    with LocalRanks(2, "gloo", tell, mistake) as ranks:
        (first, second) = ranks.receive(LONG_S)
        assert [first[:2], second[:2]] == [(0, "cpu"), (1, "cpu")]
        with pytest.raises(RankError, match=told):
            ranks.receive(LONG_S)
    assert not [pid for pid in first[2] if psutil.pid_exists(pid)]


def test_what_keeps_ranks_from_starting_is_told() -> None:
    with (
        LocalRanks(1, "gloo", tell, "", prepare=do_not_start) as ranks,
        pytest.raises(RankError, match="ImportError: no module for ranks"),
    ):
        ranks.receive(LONG_S)
