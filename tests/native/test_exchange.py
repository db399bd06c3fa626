"""HostExchange and the link over it: small messages through memory that processes share.

Where a test needs no more than other ranks, they are threads: a rank that waits holds no lock of
the interpreter.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fakes import needs_extension
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep.errors import LibraryError, PeerError, UnsupportedError
from megatron_ncclep.libraries import extension
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks import shared_memory
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.torch_group import TorchGroup

pytestmark = needs_extension

# Far more than a test takes; one that waits for it has failed.
LONG_S, SOON_S = patient(60.0), patient(30.0)
TOKEN = bytes(range(16))


@contextmanager
def new_file() -> Iterator[int]:
    """A file without a name, for memory to share."""
    file = os.memfd_create("test")
    yield file
    os.close(file)


@contextmanager
def opened(num_ranks: int) -> Iterator[list[Any]]:
    """The ends of all ranks, in this process."""
    with ExitStack() as stack:
        with new_file() as file:
            ends = [
                extension.load().HostExchange(file, TOKEN, num_ranks, rank)
                for rank in range(num_ranks)
            ]
        for end in ends:
            stack.callback(end.close)
        yield ends


def exchange(
    ends: list[Any], mine: bytes = b"x", what: str = "", timeout_s: float = LONG_S
) -> list[Any]:
    """Have all ranks exchange a message at the same time; returns what they get or raise."""

    def result(end: Any) -> Any:
        try:
            return end.exchange(mine, what, timeout_s)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(len(ends)) as ranks:
        return list(ranks.map(result, ends))


# --- who does not come ---------------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named() -> None:
    with opened(3) as ends:
        too_late = threading.Timer(SOON_S, ends[2].close)  # then they would say so
        too_late.start()
        texts = exchange(ends[:2], what="plan, call 7", timeout_s=0.3)
        too_late.cancel()
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


def test_a_rank_that_went_on_will_not_come() -> None:
    """A rank whose windows had to grow waited a minute for those that needed none."""
    with opened(3) as ends:
        for end in ends[:2]:
            end.enter(7, False, 0)
        assert ends[0].gone_on() == -1
        ends[2].enter(7, True, 0)  # it needs no exchange
        assert [end.gone_on() for end in ends] == [2, 2, -1]
        for end in ends[:2]:
            with pytest.raises(PeerError, match=r"rank 2 has gone on to call 7 without .* call 7"):
                end.exchange(b"1", "plan, making windows", LONG_S)
        for end in ends:  # no rank has given up: all meet in the next call
            end.enter(8, False, 0)
        assert exchange(ends) == [b"xxx"] * 3
        # A rank that went on sooner, after they had met, kept no other rank waiting.
        ends[2].enter(9, True, 0)
        assert [end.gone_on() for end in ends] == [-1] * 3


def test_a_rank_that_refused_a_call_will_not_come() -> None:
    with opened(2) as ends:
        assert [ends[0].refusal(rank, 0) for rank in range(2)] == ["", ""]
        for end in ends:
            end.enter(3, False, 0)
        ends[1].refuse(b"dispatch: rank 1: x is wrong" + b"!" * 5000)
        assert ends[0].refusal(1, 3).startswith("dispatch: rank 1: x is wrong!!!")
        assert len(ends[0].refusal(1, 0)) == 512
        with pytest.raises(PeerError, match=r"rank 1 refused a call .dispatch: rank 1: x is wron"):
            ends[0].exchange(b"1", "dispatch, making windows", LONG_S)
    with opened(2) as ends:  # what was refused in an earlier call has no part in this one
        ends[1].enter(8, True, 0)
        ends[1].refuse(b"not now")
        ends[0].enter(9, False, 0)
        with pytest.raises(PeerError, match=r"rank 1 refused a call .not now"):
            ends[0].exchange(b"1", "plan, call 9", LONG_S)
        for end in ends:  # as for closing an engine
            end.enter(9, False, 9)
        assert ends[0].refusal(1, 9) == ""
        assert exchange(ends) == [b"xx"] * 2
        assert ends[0].refusal(1, 0) == "not now"
        ends[1].refuse(b"")
        assert ends[0].refusal(1, 0) == ""


PEER = """
import sys, time
from megatron_ncclep import _C
end = _C.HostExchange(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), 2, 1)
end.exchange(b"1", "the first", 60)
time.sleep(60)
"""


def test_a_rank_that_is_killed_is_named_long_before_the_deadline() -> None:
    """Of one that stays a zombie: tests/faults/test_host.py."""
    with new_file() as file, closing(extension.load().HostExchange(file, TOKEN, 2, 0)) as end:
        command = [sys.executable, "-c", PEER, str(file), TOKEN.hex()]
        with subprocess.Popen(command, pass_fds=[file]) as process:
            try:
                assert end.exchange(b"0", "the first", LONG_S) == b"01"
            finally:
                threading.Timer(0.2, process.kill).start()
            start = time.monotonic()
            threading.Thread(target=process.wait).start()
            with pytest.raises(PeerError, match=rf"rank 1 \(process {process.pid}\) has died"):
                end.exchange(b"0", "the second", LONG_S)
            assert time.monotonic() - start < SOON_S


# --- ranks in different calls --------------------------------------------------------------------


def test_unequal_lengths_are_an_error_on_every_rank_and_the_next_call_works() -> None:
    with opened(2) as ends:
        for short, long in ((96, 1024), (1, 5000), (0, 1)):  # 5000: more than a round moves
            with ThreadPoolExecutor(1) as other:
                theirs = other.submit(exchange, ends[1:], bytes(long), "error messages")
                texts = [*exchange(ends[:1], bytes(short), "agree, call 3"), *theirs.result()]
            for text, what in zip(texts, ("agree, call 3", "error messages"), strict=True):
                assert "are in different calls" in str(text)
                assert f"rank 0 sent {short} bytes, rank 1 sent {long} bytes" in str(text)
                assert what in str(text)
            assert exchange(ends) == [b"xx"] * 2


# --- opening -------------------------------------------------------------------------------------


@contextmanager
def new_group(ctx: RankContext) -> Iterator[EpGroup]:
    """A group of all ranks of the pool, so that the next test finds the pool's own as it was."""
    group = dist.new_group(list(range(ctx.num_ranks)))
    yield EpGroup.of(group)
    EpGroup.of(group).close()
    dist.destroy_process_group(group)


def test_memory_of_another_group_or_version_is_not_opened() -> None:
    make = extension.load().HostExchange
    with new_file() as file, closing(make(file, TOKEN, 3, 0)):
        with pytest.raises(LibraryError, match=r"not the .* of 2 ranks"):
            make(file, TOKEN, 2, 1)
        with pytest.raises(LibraryError, match="is not that of this group"):
            make(file, TOKEN[::-1], 3, 1)
        os.pwrite(file, b"another", 0)
        with pytest.raises(LibraryError, match="not laid out for 3 ranks by this version"):
            make(file, TOKEN, 3, 1)


BIND = shared_memory._Opening.bind


def bind_and_send(opening: Any) -> None:
    """Have memory of another process arrive before rank 0's."""
    BIND(opening)
    address = shared_memory._address(opening.names[opening.rank])
    with new_file() as file, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as another:
        another.connect(address)
        socket.send_fds(another, [b"memory"], [file])


NO_FILE, NOT_PERMITTED = (b"memory", [], 0, None), PermissionError(1, "not permitted")
# What rank 0 says when something keeps one rank from sharing memory, the last or also rank 0, and
# what is replaced there.
IN_THE_WAY: dict[str, tuple[bool, Any]] = {
    "nothing": (False, nullcontext()),
    "rank {rank}: NCCLEP_HOST_EXCHANGE turns it off": (
        True, mock.patch.dict("os.environ", NCCLEP_HOST_EXCHANGE="0")
    ),
    "rank {rank}: there is none": (
        True, mock.patch.object(extension, "unavailable_reason", return_value="there is none")
    ),
    "rank {rank}: [Errno 1] not permitted": (
        True, mock.patch.object(socket, "socket", side_effect=NOT_PERMITTED)
    ),
    "rank 0: rank {rank} is on another node, or in its own network namespace": (
        False, mock.patch.object(shared_memory, "_address", return_value=b"")
    ),
    "rank {rank}: no file descriptor came with rank 0's message": (
        False, mock.patch.object(socket, "recv_fds", return_value=NO_FILE)
    ),
    "rank {rank}: ": (False, mock.patch.object(shared_memory._Opening, "bind", bind_and_send)),
}  # fmt: skip


def open_files() -> list[str]:
    """Nameless memory that this process has open or maps, and its Unix sockets."""
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    maps = re.findall(r"/memfd:ncclep.*", Path("/proc/self/maps").read_text())
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder itself
            links.append(str(file.readlink()))
    return sorted(
        [*maps, *(x for x in links if x.startswith("/memfd:") or x.strip("socket:[]") in unix)]
    )


@pytest.mark.needs_ranks(2)
@pytest.mark.parametrize(
    ("said", "rank"),
    [
        (said, rank)
        for said, (both, _) in IN_THE_WAY.items()
        for rank in ((0, -1) if both else (-1,))
    ],
)
def test_all_ranks_share_memory_or_none_does(ctx: RankContext, said: str, rank: int) -> None:
    """Ranks of one node went over the process group in silence, a hundred times as slow."""
    mine = torch.tensor([ctx.rank, 10 * ctx.rank])
    expected = [[rank, 10 * rank] for rank in range(ctx.num_ranks)]
    logged = BufferingHandler(100)
    logged.setLevel(logging.INFO)
    with new_group(ctx) as group:
        before = open_files()
        with ExitStack() as stack:
            get_logger().addHandler(logged)
            stack.callback(get_logger().removeHandler, logged)
            if ctx.rank == (rank := rank % ctx.num_ranks):
                stack.enter_context(IN_THE_WAY[said][1])
            for _ in range(2):
                assert group.hosts.gather(mine, "test", LONG_S).tolist() == expected
        uses_memory = group.hosts.link._memory is not None
        assert len(open_files()) == len(before) + uses_memory
        agreed = group.hosts.agree("plan", {"top_k": 2}, None, LONG_S, payload=ctx.rank)
        assert agreed.gathered == list(range(ctx.num_ranks))
        assert (group.hosts.link._memory is not None) == uses_memory  # chosen once
        problem = "too large" if ctx.rank == 1 else None
        problems = group.hosts.gather_problems(problem, "plan", LONG_S)
        process_group = group.torch.process_group
        group.close()
        assert open_files() == before
        again = EpGroup.of(process_group)  # which is open, and chooses again
        assert again.hosts.gather(mine, "test", LONG_S).tolist() == expected
        assert again.hosts.link._memory is not None
    assert (uses_memory, problems) == (said == "nothing", "rank 1: too large")
    lines = [record.getMessage() for record in logged.buffer]
    assert len(lines) == (ctx.rank == 0 and said != "nothing"), lines  # once
    assert all(
        said.format(rank=rank) in line and "over the process group" in line for line in lines
    ), lines


def test_ranks_without_shared_memory_refuse_to_agree_in_a_cuda_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu: Any = SimpleNamespace(_stream=object())
    with pytest.raises(UnsupportedError, match=r"plan, call 3: .*NCCLEP_HOST_EXCHANGE"):
        TorchGroup.exchange_by_torch(on_gpu, b"message", "plan, call 3", LONG_S)
