"""HostExchange and the link over it: small messages through memory that processes share.

Where a test needs no more than other ranks, they are threads: a rank that waits holds no lock of
the interpreter.
"""

from __future__ import annotations

import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ncclep.engines import exchange, extension
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import LibraryError, PeerError, UnsupportedError
from megatron_ncclep.testing.launcher import RankContext, RankPool

if extension.obstacle() is not None:
    # tests/test_packaging.py sees to it that there is one wherever there is a CUDA toolkit.
    pytest.skip(f"nothing to call: {extension.obstacle()}", allow_module_level=True)

# Far more than a test takes; one that waits for it has failed.
LONG_S = 60.0
SOON_S = 30.0
# More than one round of the exchange moves.
LONG_MESSAGE = 5000


def new_name() -> str:
    return f"/ncclep-test-{secrets.token_hex(8)}"


def is_left_behind(name: str) -> bool:
    return Path("/dev/shm", name.removeprefix("/")).exists()


@contextmanager
def opened(num_ranks: int) -> Iterator[list[Any]]:
    """The ends of all ranks, in this process."""
    name = new_name()
    with ExitStack() as stack:
        ends = []
        for rank in range(num_ranks):
            ends.append(extension.load().HostExchange(name, num_ranks, rank))
            stack.callback(ends[-1].close)
            assert is_left_behind(name) == (rank < num_ranks - 1)
        yield ends


def on_all(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make one call for each rank at the same time; return the results, or what they raised."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PeerError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as ranks:
        return list(ranks.map(result, calls))


# --- what arrives --------------------------------------------------------------------------------


def message(rank: int, number: int) -> bytes:
    """Every byte depends on the rank and the number; the length on the number, 0 included."""
    length = LONG_MESSAGE if number % 100 == 0 else number % 90
    return random.Random(1000 * number + rank).randbytes(length)


def exchange_on_rank(ctx: RankContext, name: str, count: int) -> list[bool]:
    if ctx.rank == 0:
        end = extension.load().HostExchange(name, ctx.num_ranks, 0)
        dist.barrier(ctx.group)
    else:
        dist.barrier(ctx.group)
        end = extension.load().HostExchange(name, ctx.num_ranks, ctx.rank)
    delays = random.Random(ctx.rank)
    right = []
    with closing(end):
        for number in range(count):
            # Mostly none, so that a rank can run ahead of another that is asleep.
            time.sleep(delays.choice([0, 0, 0, 0, 1e-5, 1e-4, 1e-3]))
            theirs = end.exchange(message(ctx.rank, number), f"message {number}", LONG_S)
            right.append(theirs == b"".join(message(r, number) for r in range(ctx.num_ranks)))
    return right


@pytest.mark.needs_ranks(3)
def test_every_message_arrives_whatever_the_delays(pool: RankPool) -> None:
    name = new_name()
    for right in pool.run(exchange_on_rank, name, 1000, ranks=3):
        assert right == [True] * 1000
    assert not is_left_behind(name)


# --- who does not come ---------------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named() -> None:
    with opened(3) as ends:
        texts = on_all(
            [lambda end=end: end.exchange(b"1", "plan, call 7", 0.3) for end in ends[:2]]
        )
        # Either may be the first to give up; both name the one that was not there.
        for rank, text in enumerate(texts):
            assert re.match(
                f"rank {rank} of 3: no answer from the other ranks .* in plan, call 7 "
                r"\(deadline 0\.3 s\): .*rank 2 did not come",
                str(text),
            )
        # When it comes after all, it learns at once that the others are gone, and so do they.
        with pytest.raises(PeerError, match=r"rank 0 gave up waiting.*rank 1 gave up waiting"):
            ends[2].exchange(b"1", "plan, call 7", LONG_S)
        with pytest.raises(PeerError, match=r"rank 0 of 3: plan, call 8 .* gave up"):
            ends[0].exchange(b"1", "plan, call 8", LONG_S)


def test_a_rank_that_closed_its_end_is_named() -> None:
    """But not before the message that it sent has been read."""
    with opened(2) as ends:
        assert (
            on_all([lambda end=end: end.exchange(b"1", "", LONG_S) for end in ends]) == [b"11"] * 2
        )
        waiting = threading.Timer(0.2, ends[1].close)
        waiting.start()
        with pytest.raises(PeerError, match="rank 1 has closed its end"):
            ends[0].exchange(b"2", "combine, call 2", LONG_S)
        waiting.join()
        with pytest.raises(LibraryError, match="closed"):
            ends[1].exchange(b"2", "combine, call 2", LONG_S)


PEER = """
import signal, sys
from megatron_ncclep import _C
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
end = _C.HostExchange(sys.argv[1], 2, 1)
end.exchange(b"1", "the first", 60)
print("ready", flush=True)
{then}
"""


@contextmanager
def peer_process(then: str) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Rank 0's end, and a process that is rank 1; they have met once, and rank 1 does `then`."""
    name = new_name()
    with closing(extension.load().HostExchange(name, 2, 0)) as end:
        process = subprocess.Popen(
            [sys.executable, "-c", PEER.format(then=then), name],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert end.exchange(b"0", "the first", LONG_S) == b"01"
            assert not is_left_behind(name)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield end, process
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_rank_that_is_killed_is_named_long_before_the_deadline(is_reaped: bool) -> None:
    """Also while it is a zombie: a launcher may be slow to ask for its end."""
    with peer_process("import time; time.sleep(60)") as (end, process):
        threading.Timer(0.2, process.kill).start()
        start = time.monotonic()
        if is_reaped:
            threading.Thread(target=process.wait).start()
        with pytest.raises(PeerError, match=rf"rank 1 \(process {process.pid}\) has died"):
            end.exchange(b"0", "the second", LONG_S)
        assert time.monotonic() - start < SOON_S


def test_a_signal_ends_a_wait() -> None:
    with peer_process("end.exchange(b'1', 'the second', 60)") as (end, process):
        time.sleep(0.2)  # it is inside the exchange by now; if not, the test sees less but passes
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SOON_S)
        assert "KeyboardInterrupt" in errors
        with pytest.raises(PeerError, match=r"rank 1 (gave up|.* has died)"):
            end.exchange(b"0", "the second", LONG_S)


# --- ranks in different calls --------------------------------------------------------------------


def test_unequal_lengths_are_an_error_on_every_rank_and_the_next_call_works() -> None:
    with opened(2) as ends:
        for short, long in ((96, 1024), (1, LONG_MESSAGE), (0, 1)):
            texts = on_all([
                lambda n=short: ends[0].exchange(bytes(n), "agree, call 3", LONG_S),
                lambda n=long: ends[1].exchange(bytes(n), "error messages", LONG_S),
            ])  # fmt: skip
            for text, what in zip(texts, ("agree, call 3", "error messages"), strict=True):
                assert "are in different calls" in str(text)
                assert f"rank 0 sent {short} bytes, rank 1 sent {long} bytes" in str(text)
                assert what in str(text)
            again = on_all([lambda end=end: end.exchange(b"x", "", LONG_S) for end in ends])
            assert again == [b"xx"] * 2


@contextmanager
def new_group(ctx: RankContext) -> Iterator[EpGroup]:
    """A group of all ranks of the pool, so that the next test finds the pool's own as it was."""
    group = dist.new_group(list(range(ctx.num_ranks)))
    yield EpGroup.of(group)
    EpGroup.of(group).close()
    dist.destroy_process_group(group)


def diverge_on_rank(ctx: RankContext) -> str:
    with new_group(ctx) as group:
        calls: list[Callable[[], Any]] = [
            lambda: group.agree("combine", {}, None, LONG_S),
            lambda: group.gather_problems("wrong", "plan", LONG_S),
        ]
        with pytest.raises(PeerError) as caught:
            calls[min(ctx.rank, 1)]()
    return str(caught.value)


@pytest.mark.needs_ranks(2)
def test_a_group_whose_ranks_exchange_different_things_says_so(pool: RankPool) -> None:
    first, *others = pool.run(diverge_on_rank)
    assert "while this rank is in combine, call 1" in first
    for text in others:
        assert "while this rank is in plan, exchanging error messages" in text


# --- opening -------------------------------------------------------------------------------------


def test_what_cannot_be_opened() -> None:
    native, name = extension.load(), new_name()
    with pytest.raises(LibraryError, match=r"shm_open failed: No such file"):
        native.HostExchange(name, 2, 1)
    with closing(native.HostExchange(name, 3, 0)):
        with pytest.raises(LibraryError, match="shm_open failed: File exists"):
            native.HostExchange(name, 3, 0)
        with pytest.raises(LibraryError, match=r"not the .* of 2 ranks"):
            native.HostExchange(name, 2, 1)
        assert is_left_behind(name)
    assert not is_left_behind(name)  # rank 0 closed it before all had come


class NoRoom:
    """An extension that cannot make or open shared memory."""

    def HostExchange(self, *_: Any) -> None:  # noqa: N802
        raise LibraryError("no room for shared memory")


# What keeps one rank from sharing memory: what is replaced on it.
IN_THE_WAY: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "turned off": lambda: mock.patch.dict("os.environ", NCCLEP_HOST_EXCHANGE="0"),
    "no extension": lambda: mock.patch.object(extension, "obstacle", return_value="there is none"),
    "cannot open": lambda: mock.patch.object(extension, "load", return_value=NoRoom()),
}


def link_on_rank(ctx: RankContext, rank: int, obstacle: str, name: bytes) -> tuple[bool, str]:
    mine = torch.tensor([ctx.rank, 10 * ctx.rank])
    ranks = list(range(ctx.num_ranks))
    expected = [[r, 10 * r] for r in ranks]
    with new_group(ctx) as group:
        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(exchange.secrets, "token_bytes", return_value=name)
            )
            if ctx.rank == rank % ctx.num_ranks:
                stack.enter_context(IN_THE_WAY[obstacle]())
            assert group.gather(mine, "test", LONG_S).tolist() == expected
        uses_memory = group._link._memory is not None
        assert group.agree("plan", {"top_k": 2}, None, LONG_S, told=ctx.rank).told == ranks
        assert (group._link._memory is not None) == uses_memory  # chosen once
        problems = group.gather_problems("too large" if ctx.rank == 1 else None, "plan", LONG_S)
        group.close()
        assert group.gather(mine, "test", LONG_S).tolist() == expected  # chosen anew
        assert group._link._memory is not None
    return uses_memory, problems


@pytest.mark.needs_ranks(2)
@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("obstacle", list(IN_THE_WAY))
def test_all_ranks_share_memory_or_none_does(pool: RankPool, rank: int, obstacle: str) -> None:
    name = secrets.token_bytes(exchange.NAME_BYTES)
    answers = pool.run(link_on_rank, rank, obstacle, name)
    assert answers == [(obstacle == "nothing", "rank 1: too large")] * pool.size
    assert not is_left_behind(f"/ncclep-{name.hex()}")


def test_ranks_without_shared_memory_refuse_to_agree_in_a_cuda_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu: Any = SimpleNamespace(_stream=object())
    with pytest.raises(UnsupportedError, match=r"plan, call 3: .*NCCLEP_HOST_EXCHANGE"):
        EpGroup._exchange_by_torch(on_gpu, b"message", "plan, call 3", LONG_S)
