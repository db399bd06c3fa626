"""VirtualPool on a CPU: ranks that are threads agree, differ, fail and hang as processes do.

The engine is the reference engine here, over torch's group of threads; the hosts agree through the
product's own shared memory where the extension is built.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "contract"))
import test_combine
import test_dispatch
import test_errors
import virtual_ranks
from contract_cases import contract_cases
from virtual_pool import VirtualPool

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.errors import PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext, RankError

NUM_RANKS = 3
CASES = ("uneven", "static-overflow", "bfloat16-top-6")


@pytest.fixture(scope="module")
def threads() -> Iterator[VirtualPool]:
    pool = VirtualPool(NUM_RANKS, "cpu")
    yield pool
    pool.close()


def about(ctx: RankContext) -> tuple[int, int, int, int, bool]:
    group = EpGroup.of(ctx.group)
    return ctx.rank, os.getpid(), group.rank, group.size, dist.get_rank(ctx.group) == ctx.rank


def test_ranks_are_threads_of_one_other_process(threads: VirtualPool) -> None:
    answers = threads.run(about)
    assert [answer[0] for answer in answers] == list(range(NUM_RANKS))
    assert len({answer[1] for answer in answers} - {os.getpid()}) == 1
    assert [answer[2:] for answer in answers] == [(r, NUM_RANKS, True) for r in range(NUM_RANKS)]
    assert [answer[2:] for answer in threads.run(about, ranks=2)] == [(0, 2, True), (1, 2, True)]


@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_over_threads(threads: VirtualPool, name: str) -> None:
    case = next(case for case in contract_cases(NUM_RANKS) if str(case) == name)
    test_dispatch.test_rows_and_weights_are_the_oracles(threads, "reference", case)
    test_combine.test_sums_and_values_are_the_oracles(threads, "reference", case)


def test_groups_of_threads_come_and_go(threads: VirtualPool) -> None:
    test_errors.test_a_destroyed_process_group_says_so(threads, "reference")
    test_errors.test_a_rank_outside_the_group_says_so(threads)


def has_threads_of_autograd(ctx: RankContext) -> bool:
    return torch._C._is_multithreading_enabled()


def test_backward_runs_in_the_rank_s_own_thread(threads: VirtualPool) -> None:
    """In autograd's own thread for a device ranks would wait for each other."""
    assert torch._C._is_multithreading_enabled()
    assert threads.run(has_threads_of_autograd) == [False] * NUM_RANKS


class Failed:
    """Stands in for what engines share, after a wait on the device has failed."""

    def check(self) -> None:
        raise PeerError("this rank waited")

    def close(self) -> None:
        pass


def check_on_rank(ctx: RankContext) -> str:
    group = EpGroup.of(ctx.group)
    if ctx.rank == 1:
        group.share("failed", Failed)
    group.exchange(b"shared", "the test", 30)
    try:
        megatron_ncclep.check()
    except PeerError as error:
        return str(error)
    finally:
        group.close()
    return ""


def test_check_raises_what_the_own_groups_have_met(threads: VirtualPool) -> None:
    assert threads.run(check_on_rank) == ["", "this rank waited", ""]


def skip_on_rank(ctx: RankContext) -> str:
    config = EpConfig(engine="reference", timeout_s=2)
    with closing(create_engine(ctx.group, 4 * ctx.num_ranks, config)) as engine:
        plan = engine.plan(torch.zeros(1, 1, dtype=torch.int64))
        step = engine.plan if ctx.rank == 2 else engine.dispatch
        argument = torch.zeros(1, 1, dtype=torch.int64) if ctx.rank == 2 else plan
        with pytest.raises(PeerError) as caught:
            step(argument) if ctx.rank == 2 else step(argument, torch.ones(1, 4))
    return str(caught.value)


def late_on_rank(ctx: RankContext) -> str:
    group = EpGroup.of(ctx.group)
    group.exchange(b"first", "the test", 30)  # chooses how
    if ctx.rank == 1:
        time.sleep(2)
        return "late"
    with pytest.raises(PeerError) as caught:
        group.exchange(b"again", "the test", 0.5)
    return str(caught.value)


def test_hosts_tell_who_is_in_another_call_or_does_not_come() -> None:
    """In a pool of its own: a group that gave up is of no use afterwards."""
    pool = VirtualPool(NUM_RANKS, "cpu")
    try:
        for text in pool.run(skip_on_rank):
            assert "rank 0 is in dispatch" in text
            assert "rank 2 is in plan" in text
        if extension.obstacle() is None:  # torch's group of threads has no deadline
            first, second, third = pool.run(late_on_rank)
            assert second == "late"
            for rank, text in ((0, first), (2, third)):
                assert text.startswith(f"rank {rank} of 3: no answer from the other ranks"), text
            assert any("rank 1 did not come" in text for text in (first, third))
    finally:
        pool.close()


def fail_on_rank(ctx: RankContext) -> int:
    assert ctx.rank != 1, "rank 1 is wrong"
    return os.getpid()


def hang_on_rank(ctx: RankContext) -> None:
    if ctx.rank == 2:
        time.sleep(600)  # where it hangs


def wait_for_the_wrong(ctx: RankContext) -> None:
    assert ctx.rank != 2, "rank 2 is wrong"
    time.sleep(600)


def interrupted_on_rank(ctx: RankContext, pid: int) -> None:
    if ctx.rank == 1:
        time.sleep(0.5)  # until no thread runs: Python may crash when it writes the stack of one
        os.kill(pid, signal.SIGINT)
        time.sleep(600)  # where it hangs


def die_on_rank(ctx: RankContext) -> None:
    if ctx.rank == 2:
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(600)


def test_what_goes_wrong_ends_the_process_and_is_told() -> None:
    pool = VirtualPool(NUM_RANKS, "cpu")
    try:
        (before, *_) = pool.run(os_getpid)
        with pytest.raises(RankError, match=r"(?s)--- rank 1 ---.*rank 1 is wrong"):
            pool.run(fail_on_rank)
        (after, *_) = pool.run(os_getpid)
        assert after != before  # a group of a call that failed is of no use
        with pytest.raises(RankError, match=r"(?s)rank 2 did not answer.*in hang_on_rank"):
            pool.run(hang_on_rank, timeout=1)
        # It was told that rank 0 does not answer, and not why.
        with pytest.raises(RankError, match=r"(?s)rank 0 did not answer.*rank 2 is wrong"):
            pool.run(wait_for_the_wrong, timeout=10)
        # Workers of pytest-xdist and jobs in a shell's background ignore Ctrl-C.
        before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt, match=r"in interrupted_on_rank"):
                pool.run(interrupted_on_rank, os.getpid(), timeout=60)
        finally:
            signal.signal(signal.SIGINT, before_test)
        with pytest.raises(RankError, match=r"(?s)rank 0 died.*the last words"):
            pool.run(die_on_rank)
        assert pool.run(os_getpid, ranks=1)[0] != after
    finally:
        pool.close()


def test_everything_that_is_replaced_is_there() -> None:
    """In a process of its own; without a GPU, and so without what starts CUDA.

    A rank that copied to the host behind a kernel that waited for another rank kept that rank from
    launching: all of tests/contract/test_low_latency.py hung, to the deadline of each wait.
    """
    code = (
        "import torch, virtual_ranks\n"
        "host = virtual_ranks.Host(1, 'cpu')\n"
        "host._replace_what_means_the_device()\n"
        "ctx = virtual_ranks.RankContext(0, 1, host.become(0)[1], 'cpu')\n"
        "print(virtual_ranks.on_rank(ctx, lambda ctx: str(\n"
        "    virtual_ranks.group.EpGroup.of(ctx.group).device)))\n"
        "class OnGpu(torch.Tensor):\n"
        "    is_cuda = True\n"
        "    __torch_function__ = torch._C._disabled_torch_function_impl\n"
        "class Stream:\n"
        "    synchronize = staticmethod(lambda: print('waits', end=' '))\n"
        "torch.cuda.current_stream = Stream\n"
        "one = torch.ones(1).as_subclass(OnGpu)\n"
        "for copy in (one.cpu, one.item, one.tolist, lambda: one.to('cpu'),\n"
        "             lambda: one.to(torch.float16),\n"
        "             lambda: torch.ones(1).to('cpu', torch.float16), torch.ones(1).cpu):\n"
        "    copy()\n"
        "    print('copies')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    device, *copies = done.stdout.splitlines()
    assert device == "cuda:0"
    assert copies == ["waits copies"] * 4 + ["copies"] * 3


def os_getpid(ctx: RankContext) -> int:
    return os.getpid()


def test_all_ranks_fit_on_the_gpu() -> None:
    for ranks in range(1, virtual_ranks.MOST_RANKS + 1):
        assert ranks * virtual_ranks.num_sms(ranks) <= virtual_ranks.MOST_SMS
    streams = virtual_ranks.MOST_RANKS * virtual_ranks.STREAMS_PER_RANK
    assert streams < virtual_ranks.CONNECTIONS
