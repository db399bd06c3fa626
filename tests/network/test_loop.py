"""The test networks do what NCCL, and tests of kernels over a network, take for granted.

Ranks are processes that call a plugin as NCCL does (plugin_rank.py).  Each function without
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
from loop import COUNTERS, NET_COUNTERS, build, counters, net_counters
from plugin_rank import HOST, PluginRank, error_of, wait
from timeouts import patient

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the test network")

# The functions of rma_plugin.h and of net_plugin.h.
RMA_TABLE = {
    "init": "pQp", "devices": "p", "properties": "ip", "listen": "pipp", "connect": "ppiipp",
    "create_context": "ppp", "add_region": "ppQiQp", "add_dmabuf": "ppQiQiQp",
    "remove_region": "pp", "destroy_context": "p", "close_group": "p", "close_listener": "p",
    "put": "piQpQQpIp", "put_signal": "piQpQQpIQpQI?p", "get": "piQpQQpIp", "flush": "pipIp",
    "test": "ppp", "progress": "p", "last_error": "pp", "finalize": "p",
}  # fmt: skip
NET_TABLE = {
    "init": "pQppp", "devices": "p", "properties": "ip", "listen": "pipp", "connect": "pippp",
    "accept": "ppp", "add_memory": "ppQip", "add_dmabuf": "ppQiQip", "remove_memory": "pp",
    "send": "ppQippp", "receive": "pipppppp", "flush": "pipppp", "test": "ppp",
    "close_sender": "p", "close_receiver": "p", "close_listener": "p",
    "device_memory": "ppp", "received_on_device": "pip", "make_device": "pp", "finalize": "p",
    "set_attributes": "pp",
}  # fmt: skip
ADD, NEVER_RESET = 2, 2
SYSTEM_ERROR, INVALID_USAGE, REMOTE_ERROR = 2, 5, 6
MAX_UNDER_WAY = 64


# --- puts ----------------------------------------------------------------------------------------


class RmaRank(PluginRank):
    """One rank over the plugin for puts, with a region of data and a signal; collective."""

    def __init__(self, plugin: str, num_bytes: int, link: dict[str, str]) -> None:
        super().__init__(plugin, "ncclRmaPlugin_v14", RMA_TABLE, link)
        instance = ctypes.c_void_p()
        self.call("init", ctypes.byref(instance), 0, None)
        listener, handles = self.listen(instance)
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
        wait(lambda: True if holds() else self.call("progress", self.context))
        for _ in range(3):
            self.call("progress", self.context)

    def finish(self, requests: list[ctypes.c_void_p]) -> None:
        """Make progress until the requests are done, each of which is asked for until it is."""
        self.until(lambda: not requests or (self.is_done(requests[0]) and not requests.pop(0)))

    def close(self) -> None:
        self.gather(None)
        self.call("destroy_context", self.context)
        self.call("close_group", self.group)


def puts_arrive_in_their_time(plugin: str) -> None:
    """Two ranks put to one, which receives them one after the other; then one puts to two.

    Puts have many sizes, and a signal does not come before its bytes.
    """
    sizes = [1, 7, 0, 65536, 65537, 300_001, 13, 568_905]
    ends, size = np.cumsum(sizes).tolist(), sum(sizes)
    me = RmaRank(plugin, 4 * size, {"RMA_LOOP_GBPS": "0.004", "RMA_LOOP_LATENCY_US": "30000"})
    contents = [np.random.default_rng(r).integers(1, 256, size, np.uint8) for r in range(3)]
    me.data[:size] = contents[me.rank]
    total = num_puts = 0

    def all_have_arrived() -> bool:
        assert np.count_nonzero(me.data[size:]) >= me.signal()
        return me.signal() == total

    for moves in ([(0, 2), (1, 2)], [(2, 0), (2, 1)]):
        me.gather(None)
        start = min(me.gather(time.monotonic()))
        sent = [
            me.put(receiver, (1 + sender) * size + end - part, end - part, part, part)
            for part, end in zip(sizes, ends, strict=True)
            for sender, receiver in moves
            if sender == me.rank
        ]
        senders = [sender for sender, receiver in moves if receiver == me.rank]
        total, num_puts = total + size * len(senders), num_puts + len(sent)
        me.until(all_have_arrived)
        arrival = time.monotonic() if senders else 0.0
        for sender in senders:
            assert (me.data[(1 + sender) * size :][:size] == contents[sender]).all()
        me.finish(sent)
        assert max(me.gather(arrival)) - start > 2 * size / 4e6 + 0.03
    expected = (num_puts, num_puts // len(sizes) * size, 0, total, 0)
    assert counters(plugin) == dict(zip(COUNTERS, expected, strict=True))
    me.close()


def a_fault(plugin: str, sender: str, receiver: str, done: list[bool], bytes_: list[int]) -> None:
    """Rank 0 puts three bytes to rank 1, over links with faults."""
    start = time.monotonic()
    fault = sender if os.environ["RANK"] == "0" else receiver
    me = RmaRank(plugin, 4, {"RMA_LOOP_FAULT": fault} if fault else {})
    requests = []
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
    if sender == "stop:2":
        assert me.data[0] == (10 if me.rank == 0 else 0)
        os.environ.pop("RMA_LOOP_FAULT", None)
        assert ctypes.CDLL(plugin).rma_loop_read_environment() == 0
        me.until(lambda: me.rank == 0 or me.signal() == 3)  # and goes on
        me.finish(requests[1:])
        assert me.data[1:].tolist() == [10, 20, 30]
    me.close()


def wrong_puts_are_errors(plugin: str) -> None:
    """Outside of registered memory nothing is written, not even the part that is inside, and both
    ends see an error.  A link that is wrong leaves the one before.
    """
    me = RmaRank(plugin, 200_000, {"RMA_LOOP_RECEIVES": "4"})  # longer than one slot
    for wrong in ("RECEIVES=0", "RECEIVES=3", "RECEIVES=1.5", "GBPS=x"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*f"RMA_LOOP_{wrong}".split("="))
            assert ctypes.CDLL(plugin).rma_loop_read_environment() == INVALID_USAGE
    properties = (ctypes.c_int * 64)()
    me.call("properties", 0, properties)
    assert properties[13] == 4  # `max_receives` of `Properties` in rma_plugin.h
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


# --- NCCL's own messages -------------------------------------------------------------------------


class NetRank(PluginRank):
    """One rank with a connection to and from the next one and the one before, and memory for both;
    collective."""

    def __init__(self, plugin: str, num_bytes: int, link: dict[str, str]) -> None:
        super().__init__(plugin, "ncclNetPlugin_v11", NET_TABLE, link)
        self.instance = ctypes.c_void_p()
        self.call("init", ctypes.byref(self.instance), 0, None, None, None)
        listener, handles = self.listen(self.instance)
        to = handles[(self.rank + 1) % self.num_ranks]
        self.sender, self.receiver = ctypes.c_void_p(), ctypes.c_void_p()

        def connected() -> bool | None:
            if not self.sender:
                self.call("connect", self.instance, 0, to, ctypes.byref(self.sender), None)
            if not self.receiver:
                self.call("accept", listener, ctypes.byref(self.receiver), None)
            return True if self.sender and self.receiver else None

        wait(connected)
        self.call("close_listener", listener)
        self.out, self.into = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        self.memories = [
            self.made("add_memory", connection, data.ctypes.data, num_bytes, HOST)
            for connection, data in ((self.sender, self.out), (self.receiver, self.into))
        ]

    def send(self, at: int, size: int) -> ctypes.c_void_p:
        address = self.out.ctypes.data + at
        return self.made("send", self.sender, address, size, 0, self.memories[0], None)

    def receive(self, at: int, size: int) -> ctypes.c_void_p:
        one = ctypes.c_void_p * 1
        return self.made(
            "receive", self.receiver, 1, one(self.into.ctypes.data + at),
            (ctypes.c_size_t * 1)(size), (ctypes.c_int * 1)(0), one(self.memories[1]), one(None),
        )  # fmt: skip

    def size_of(self, request: ctypes.c_void_p) -> int | None:
        """Of a message that is complete."""
        done, size = ctypes.c_int(), ctypes.c_int()
        self.call("test", request, ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None

    def wait(self, request: ctypes.c_void_p) -> int:
        return wait(lambda: self.size_of(request))

    def close(self) -> None:
        self.gather(None)
        self.call("close_sender", self.sender)
        self.call("close_receiver", self.receiver)
        self.call("finalize", self.instance)


def messages_arrive_in_order_and_time(plugin: str) -> None:
    """Of many sizes, more than a ring has slots, each into a buffer with room to spare."""
    sizes = [0, 1, 7, 65536, 262_145, *[13] * 6] * 24
    room = max(sizes) + 64
    me = NetRank(plugin, 8 * room, {"RMA_LOOP_GBPS": "0.01", "RMA_LOOP_LATENCY_US": "30000"})
    files = len(os.listdir("/proc/self/fd"))
    requests: list[Any] = []

    def contents(rank: int, number: int) -> np.ndarray:
        return np.random.default_rng([rank, number]).integers(0, 255, sizes[number], np.uint8)

    def check(number: int) -> None:
        size, at = sizes[number], number % 8 * room
        assert [me.wait(request) for request in requests[number]] == [size, size]
        before = (me.rank - 1) % me.num_ranks
        assert (me.into[at : at + size] == contents(before, number)).all()
        assert (me.into[at + size : at + room] == 255).all()

    start = min(me.gather(time.monotonic()))
    for number, size in enumerate(sizes):
        at = number % 8 * room
        if number >= 8:  # the place is taken
            check(number - 8)
        me.into[at : at + room] = 255
        me.out[at : at + size] = contents(me.rank, number)
        sent = me.send(at, size)
        if number == 0:  # it waits for its receiver
            time.sleep(0.1)
            assert me.size_of(sent) is None
            me.gather(None)
        requests.append((me.receive(at, room), sent))
    for number in range(len(sizes) - 8, len(sizes)):
        check(number)
    assert max(me.gather(time.monotonic())) - start > sum(sizes) / 1e7 + 0.03
    expected = dict(zip(NET_COUNTERS, (len(sizes), sum(sizes), 0), strict=True))
    assert net_counters(plugin) == expected
    assert len(os.listdir("/proc/self/fd")) == files
    me.close()


def wrong_messages_are_errors(plugin: str) -> None:
    me = NetRank(plugin, 100, {})
    two = ("receive", me.receiver, 2, None, None, None, None, None, None)
    assert error_of(me.call, *two) == INVALID_USAGE
    requests = [me.receive(0, 10) for _ in range(MAX_UNDER_WAY)]
    assert all(requests)
    assert not me.receive(0, 10)  # too many
    assert error_of(me.wait, me.send(0, 11)) == SYSTEM_ERROR  # larger than its place
    assert not me.into[0].any()
    me.close()


server = closed(lambda: ForkServer("test_loop"), "module")
YES, NO = True, False


@pytest.mark.parametrize(
    ("scenario", "num_ranks", "arguments"),
    [
        ("puts_arrive_in_their_time", 3, []),
        ("a_fault", 2, ["drop:2", "", [YES, YES, YES], [10, 0, 30, 2]]),
        ("a_fault", 2, ["delay:2:400", "", [YES, YES, YES], [10, 20, 30, 3]]),
        ("a_fault", 2, ["stop:2", "", [YES, NO, NO], [10, 0, 0, 1]]),
        ("a_fault", 2, ["", "silent:0", [NO, NO, NO], [0, 0, 0, 0]]),
        ("wrong_puts_are_errors", 2, []),
        ("messages_arrive_in_order_and_time", 3, []),
        ("wrong_messages_are_errors", 2, []),
    ],
)
def test_the_networks(
    scenario: str, num_ranks: int, arguments: list[Any], server: ForkServer
) -> None:
    """On all ranks; nothing is left in shared memory."""
    before = set(os.listdir("/dev/shm"))
    function = (f"test_loop:{scenario}", [str(build()), *arguments])
    ended = server.run(*function, num_ranks, patient(120.0))
    assert [end.exit_code for end in ended] == [0] * num_ranks, [end.output for end in ended]
    assert [name for name in set(os.listdir("/dev/shm")) - before if "rma" in name] == []
