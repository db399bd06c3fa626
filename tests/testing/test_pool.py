"""RankPool: one process imports, its forks are the ranks, and nothing is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from megatron_ncclep.ranks.pool import RankContext, RankError, RankPool

PREPARED: list[int] = []


def prepare() -> None:
    PREPARED.append(os.getpid())


def whereabouts(ctx: RankContext) -> tuple[int, int, list[int]]:
    return os.getpid(), os.getppid(), PREPARED


def has_imported(ctx: RankContext, tensor: torch.Tensor, module: str) -> tuple[float, bool]:
    return tensor.item(), module in sys.modules


def end(ctx: RankContext) -> None:
    if ctx.rank == 1:
        os._exit(3)


def hang(ctx: RankContext) -> None:
    while ctx.rank == 1:
        time.sleep(1)


def fail(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise ZeroDivisionError("a bug")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2, prepare=prepare)
    yield pool
    pool.close()


def test_ranks_are_forks_of_one_process(pool: RankPool) -> None:
    (first, parent, prepared), (second, same, _) = pool.run(whereabouts)
    assert first != second
    assert prepared == [parent] == [same]
    pool.close()
    assert not [pid for pid in (first, second, parent) if psutil.pid_exists(pid)]


def test_tensors_import_nothing(pool: RankPool) -> None:
    """Megatron-Core replaces the function that pickled tensors name: the ranks of other tests all
    imported Megatron-Core, once this process had.
    """
    import tabnanny  # here: what this file imports is imported with the ranks' function

    with mock.patch("torch.storage._load_from_bytes", tabnanny.check):
        assert pool.run(has_imported, torch.tensor(2.0), "tabnanny") == [(2.0, False)] * 2


@pytest.mark.parametrize(
    ("mistake", "told"),
    [(end, "rank 1 died"), (hang, "rank 1 did not answer within 3 s")],
)
def test_a_rank_that_is_gone_costs_all_processes(
    pool: RankPool, mistake: Callable[[RankContext], None], told: str
) -> None:
    before = pool.run(whereabouts)
    with pytest.raises(RankError, match=told):
        pool.run(mistake, timeout=3)
    after = pool.run(whereabouts)
    assert {pid for pid, *_ in before}.isdisjoint(pid for pid, *_ in after)
    assert not [pid for pid, *_ in before if psutil.pid_exists(pid)]


def test_an_exception_costs_nothing(pool: RankPool) -> None:
    before = pool.run(whereabouts)
    with pytest.raises(RankError, match=r"(?s)--- rank 1 ---.*ZeroDivisionError: a bug"):
        pool.run(fail)
    assert pool.run(whereabouts) == before


def test_a_failed_test_costs_later_ones_nothing() -> None:
    """A rank that compiled for too long failed its test, and then every other one of its pool."""
    planted = str(Path(__file__).with_name("planted_failure.py"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--ranks", "2", planted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "PeerError: rank 0 of 2: no answer from the other ranks" in done.stdout, done
    assert "1 failed, 1 passed" in done.stdout, done
