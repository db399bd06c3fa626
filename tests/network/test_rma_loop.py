"""The test network does what tests of kernels over a network take for granted.

Ranks are processes that call the plugin as NCCL does (plugin_rank.py).  Each function without
`test_` in its name is a scenario, which runs on every rank.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fixtures import closed
from fork_server import ForkServer
from loop import COUNTERS, build, counters
from plugin_rank import HOST, PluginError, PluginRank
from timeouts import patient

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the test network")

# The functions of rma_plugin.h.
TABLE = {
    "init": "pQp", "devices": "p", "properties": "ip", "listen": "pipp", "connect": "ppiipp",
    "create_context": "ppp", "add_region": "ppQiQp", "add_dmabuf": "ppQiQiQp",
    "remove_region": "pp", "destroy_context": "p", "close_group": "p", "close_listener": "p",
    "put": "piQpQQpIp", "put_signal": "piQpQQpIQpQI?p", "get": "piQpQQpIp", "flush": "pipIp",
    "test": "ppp", "progress": "p", "last_error": "pp", "finalize": "p",
}  # fmt: skip
ADD, NEVER_RESET = 2, 2
INVALID_USAGE, REMOTE_ERROR = 5, 6
SAFETY_S = 60.0


class Rank(PluginRank):
    """One rank over the plugin, with a region of data and a signal; collective.

    Args:
        plugin: its path.
        num_bytes: size of the data.
        link: variables of this rank's link (link.h).
    """

    def __init__(self, plugin: str, num_bytes: int, link: dict[str, str]) -> None:
        super().__init__(plugin, "ncclRmaPlugin_v14", TABLE, link)
        instance = ctypes.c_void_p()
        self.call("init", ctypes.byref(instance), 0, None)
        handle, listener = ctypes.create_string_buffer(128), ctypes.c_void_p()
        self.call("listen", instance, 0, handle, ctypes.byref(listener))
        handles = [ctypes.create_string_buffer(raw, 128) for raw in self.gather(handle.raw)]
        addresses = (ctypes.c_void_p * self.num_ranks)(*map(ctypes.addressof, handles))
        self.group = self.made("connect", instance, addresses, self.num_ranks, self.rank, listener)
        self.call("close_listener", listener)
        self.context = self.made("create_context", self.group, None)
        self.data, self.region = self.add_region(num_bytes)
        self.signals, self.signal_region = self.add_region(8, NEVER_RESET)
        self.gather(None)

    def add_region(self, num_bytes: int, flags: int = 0) -> tuple[np.ndarray, ctypes.c_void_p]:
        """New memory and its registration; all ranks register in one order."""
        data = np.zeros(num_bytes, np.uint8)
        address = ctypes.c_void_p(data.ctypes.data)
        return data, self.made("add_region", self.group, address, num_bytes, HOST, flags)

    def put(
        self, rank: int, to: int, from_: int, size: int, value: int = 1,
        region: Any = None, signal_at: int = 0,
    ) -> ctypes.c_void_p:  # fmt: skip
        """Put bytes of this rank's data into another's, then add to its signal."""
        return self.made(
            "put_signal", self.context, 0, from_, self.region, size,
            to, region or self.region, rank, signal_at, self.signal_region, value, ADD, True,
        )  # fmt: skip

    def is_done(self, request: ctypes.c_void_p) -> bool:
        done = ctypes.c_int()
        self.call("test", self.group, request, ctypes.byref(done))
        return done.value != 0

    def has_error(self) -> bool:
        error = ctypes.c_bool()
        self.call("last_error", self.context, ctypes.byref(error))
        return error.value

    def signal(self) -> int:
        return int(self.signals.view(np.uint64)[0])

    def step(self) -> None:
        """Let everything that moves without a delay arrive, and be known to.  Collective."""
        for _ in range(3):
            self.call("progress", self.context)
            self.gather(None)

    def until(self, holds: Callable[[], bool]) -> None:
        """Make progress until it holds, and peers know of it."""
        give_up = time.monotonic() + SAFETY_S
        while not holds():
            assert time.monotonic() < give_up
            self.call("progress", self.context)
            time.sleep(1e-4)  # there may be fewer cores than ranks
        for _ in range(3):
            self.call("progress", self.context)

    def close(self) -> None:
        self.gather(None)
        self.call("destroy_context", self.context)
        self.call("close_group", self.group)


def error_of(call: Callable[..., Any], *arguments: Any) -> int:
    """The number of the error that a call ends with; 0: none."""
    try:
        call(*arguments)
    except PluginError as error:
        return error.args[0]
    return 0


def every_message_arrives(plugin: str) -> None:
    """Of many sizes, from every rank to every rank, itself included; its signal not before it."""
    sizes = [1, 7, 0, 65536, 65537, 300_001, 13, 6_000_000]
    ends = np.cumsum(sizes)
    one, num_ranks = int(ends[-1]), int(os.environ["WORLD_SIZE"])
    me = Rank(plugin, 2 * num_ranks * one, {})
    out, into = np.split(me.data, 2)
    for receiver in range(num_ranks):
        random = np.random.default_rng(me.rank * num_ranks + receiver)
        out[receiver * one : (receiver + 1) * one] = random.integers(0, 256, one, np.uint8)
    requests = []
    for size, end in zip(sizes, ends.tolist(), strict=True):
        for receiver in range(num_ranks):
            to = (num_ranks + me.rank) * one + end - size
            value = size + (1 << 40 if size == 13 else 0)
            requests.append(me.put(receiver, to, receiver * one + end - size, size, value))

    def all_have_arrived() -> bool:
        # Where so many bytes were signalled, at least so many are there.
        assert np.count_nonzero(into) >= me.signal() % (1 << 40) * 0.98 - 10
        return me.signal() == num_ranks * (one + (1 << 40))

    me.until(all_have_arrived)
    for sender in range(num_ranks):
        random = np.random.default_rng(sender * num_ranks + me.rank)
        assert (into[sender * one :][:one] == random.integers(0, 256, one, np.uint8)).all()
    me.until(lambda: not requests or (me.is_done(requests[0]) and not requests.pop(0)))
    num_bytes = num_ranks * one
    expected = (num_ranks * len(sizes), num_bytes, 0, num_bytes, 0)
    assert counters(plugin) == dict(zip(COUNTERS, expected, strict=True))
    me.close()


def a_link_takes_its_time(plugin: str) -> None:
    """Two ranks put to one, which receives them one after the other; then one puts to two."""
    size = 1_000_000
    me = Rank(plugin, 2 * size, {"RMA_LOOP_GBPS": "0.004", "RMA_LOOP_LATENCY_US": "30000"})
    total = 0
    for moves in ([(0, 2), (1, 2)], [(2, 0), (2, 1)]):
        start = min(me.gather(time.monotonic()))
        sent = [me.put(receiver, 0, 0, size) for sender, receiver in moves if sender == me.rank]
        due = sum(receiver == me.rank for _, receiver in moves)
        total += due
        me.until(lambda total=total: me.signal() == total)
        arrival = time.monotonic() if due else 0.0
        me.until(lambda sent=sent: not sent or (me.is_done(sent[0]) and not sent.pop(0)))
        assert max(me.gather(arrival)) - start > 2 * size / 4e6 + 0.03
    me.close()


def a_fault(plugin: str, sender: str, receiver: str, done: list[bool], bytes_: list[int]) -> None:
    """Rank 0 puts three bytes to rank 1, over links with faults."""
    start = time.monotonic()
    fault = sender if os.environ["RANK"] == "0" else receiver
    me = Rank(plugin, 4, {"RMA_LOOP_FAULT": fault} if fault else {})
    if me.rank == 0:
        me.data[1:] = 10, 20, 30
        requests = [me.put(1, i, i, 1) for i in (1, 2, 3)]
    me.step()
    if "delay" in sender:  # a pair's messages stay in order
        if me.rank == 1:
            me.until(lambda: me.signal() == 3)
            assert time.monotonic() - start > 0.4
        me.step()
    if me.rank == 0:
        assert [me.is_done(request) for request in requests] == done
    else:
        assert [*me.data[1:].tolist(), me.signal()] == bytes_
        if sender == "stop:2":  # it still receives
            me.put(0, 0, 1, 1)
    me.step()
    assert sender != "stop:2" or me.data[0] == (10 if me.rank == 0 else 0)
    me.close()


def receives(me: Rank) -> int:
    """How many the plugin says that it takes."""
    properties = (ctypes.c_int * 64)()
    me.call("properties", 0, properties)
    return properties[13]  # of `Properties` in rma_plugin.h


def a_direction_stops_and_goes_on(plugin: str) -> None:
    """With a plugin of one receive, as many puts as NCCL's queue has places then wait."""
    read = ctypes.CDLL(plugin).rma_loop_read_environment
    me = Rank(plugin, 64, {"RMA_LOOP_RECEIVES": "1"})
    assert receives(me) == 1
    os.environ["RMA_LOOP_FAULT"] = "stop:1"
    assert read() == 0
    sent = []
    if me.rank == 0:
        me.data[:] = 1
        sent = [me.put(1, i, i, 1) for i in range(32)]
    me.step()
    assert not any(map(me.is_done, sent))
    assert not (me.rank == 1 and (me.data.any() or me.signal()))
    del os.environ["RMA_LOOP_FAULT"]
    assert read() == 0
    me.until(lambda: me.rank == 0 or me.signal() == 32)
    me.until(lambda: not sent or (me.is_done(sent[0]) and not sent.pop(0)))
    assert me.rank == 0 or me.data.sum() == 32
    for wrong in ("0", "3", "1.5"):
        os.environ["RMA_LOOP_RECEIVES"] = wrong
        assert read() == INVALID_USAGE
    assert receives(me) == 1
    me.close()


def memory_that_is_not_registered(plugin: str) -> None:
    """Writes nothing, not even the part that is inside; both ends see an error."""
    me = Rank(plugin, 200_000, {})  # longer than one slot
    gone, gone_region = me.add_region(64)
    me.gather(None)
    if me.rank == 0:
        for from_, size in ((0, 200_001), (199_999, 2), (2**63, 2)):
            assert error_of(me.put, 1, 0, from_, size) == INVALID_USAGE
        me.data[:] = 1
    else:
        me.call("remove_region", me.group, gone_region)
    me.step()
    assert not me.has_error()
    if me.rank == 0:
        requests = [
            me.put(1, 50_001, 0, 150_000),
            me.put(1, 0, 0, 4, region=gone_region),
            me.put(1, 0, 0, 4, signal_at=1),
            me.put(1, 0, 0, 4, signal_at=8),
        ]
    me.step()
    if me.rank == 0:
        assert [error_of(me.is_done, request) for request in requests] == [REMOTE_ERROR] * 4
    else:
        assert me.has_error()
        assert counters(plugin)["refused"] == 4
        assert not any(map(np.any, (me.data, gone, me.signals)))
    me.close()


server = closed(lambda: ForkServer("test_rma_loop"), "module")
YES, NO = True, False


@pytest.mark.parametrize(
    ("scenario", "num_ranks", "arguments"),
    [
        ("every_message_arrives", 1, []),
        ("every_message_arrives", 4, []),
        ("a_link_takes_its_time", 3, []),
        ("a_fault", 2, ["drop:2", "", [YES, YES, YES], [10, 0, 30, 2]]),
        ("a_fault", 2, ["delay:2:400", "", [YES, YES, YES], [10, 20, 30, 3]]),
        ("a_fault", 2, ["stop:2", "", [YES, NO, NO], [10, 0, 0, 1]]),
        ("a_fault", 2, ["", "silent:0", [NO, NO, NO], [0, 0, 0, 0]]),
        ("a_direction_stops_and_goes_on", 2, []),
        ("memory_that_is_not_registered", 2, []),
    ],
)
def test_the_network(
    scenario: str, num_ranks: int, arguments: list[Any], server: ForkServer
) -> None:
    """On all ranks; nothing is left in shared memory."""
    before = set(os.listdir("/dev/shm"))
    function = (f"test_rma_loop:{scenario}", [str(build()), *arguments])
    ended = server.run(*function, num_ranks, patient(120.0))
    assert [end.exit_code for end in ended] == [0] * num_ranks, [end.output for end in ended]
    assert [name for name in set(os.listdir("/dev/shm")) - before if "rma" in name] == []
