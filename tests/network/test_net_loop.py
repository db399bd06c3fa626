"""The test network for NCCL's own messages does what NCCL takes for granted.

Ranks are processes that call the plugin as NCCL does (plugin_rank.py).  Each function without
`test_` in its name is a scenario, which runs on every rank.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from typing import Any

import numpy as np
import pytest
from fixtures import closed
from fork_server import ForkServer
from loop import NET_COUNTERS, build, net_counters
from plugin_rank import HOST, PluginError, PluginRank
from timeouts import patient

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the test network")

# The functions of net_plugin.h.
TABLE = {
    "init": "pQppp", "devices": "p", "properties": "ip", "listen": "pipp", "connect": "pippp",
    "accept": "ppp", "add_memory": "ppQip", "add_dmabuf": "ppQiQip", "remove_memory": "pp",
    "send": "ppQippp", "receive": "pipppppp", "flush": "pipppp", "test": "ppp",
    "close_sender": "p", "close_receiver": "p", "close_listener": "p",
    "device_memory": "ppp", "received_on_device": "pip", "make_device": "pp", "finalize": "p",
    "set_attributes": "pp",
}  # fmt: skip
SYSTEM_ERROR, INVALID_USAGE = 2, 5
SAFETY_S = 60.0
MAX_UNDER_WAY = 64


class NetRank(PluginRank):
    """One rank with a connection to and from the next one and the one before; collective."""

    def __init__(self, plugin: str, link: dict[str, str]) -> None:
        super().__init__(plugin, "ncclNetPlugin_v11", TABLE, link)
        self.instance = ctypes.c_void_p()
        self.call("init", ctypes.byref(self.instance), 0, None, None, None)
        handle = ctypes.create_string_buffer(128)
        listener = ctypes.c_void_p()
        self.call("listen", self.instance, 0, handle, ctypes.byref(listener))
        handles = self.gather(handle.raw)
        to = ctypes.create_string_buffer(handles[(self.rank + 1) % self.num_ranks], 128)
        self.sender, self.receiver = ctypes.c_void_p(), ctypes.c_void_p()
        give_up = time.monotonic() + SAFETY_S
        while not (self.sender and self.receiver):
            assert time.monotonic() < give_up
            if not self.sender:
                self.call("connect", self.instance, 0, to, ctypes.byref(self.sender), None)
            if not self.receiver:
                self.call("accept", listener, ctypes.byref(self.receiver), None)
        self.call("close_listener", listener)

    def add_memory(
        self, connection: ctypes.c_void_p, num_bytes: int
    ) -> tuple[np.ndarray, ctypes.c_void_p]:
        data = np.zeros(num_bytes, np.uint8)
        return data, self.made("add_memory", connection, data.ctypes.data, num_bytes, HOST)

    def send(self, memory: tuple[np.ndarray, Any], at: int, size: int) -> ctypes.c_void_p:
        data, registered = memory
        return self.made("send", self.sender, data.ctypes.data + at, size, 0, registered, None)

    def receive(self, memory: tuple[np.ndarray, Any], at: int, size: int) -> ctypes.c_void_p:
        data, registered = memory
        one = ctypes.c_void_p * 1
        return self.made(
            "receive", self.receiver, 1, one(data.ctypes.data + at),
            (ctypes.c_size_t * 1)(size), (ctypes.c_int * 1)(0), one(registered), one(None),
        )  # fmt: skip

    def size_of(self, request: ctypes.c_void_p) -> int | None:
        """Of a message that is complete."""
        done, size = ctypes.c_int(), ctypes.c_int()
        self.call("test", request, ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None

    def wait(self, request: ctypes.c_void_p) -> int:
        give_up = time.monotonic() + SAFETY_S
        while (size := self.size_of(request)) is None:
            assert time.monotonic() < give_up
            time.sleep(1e-4)
        return size

    def close(self) -> None:
        self.gather(None)
        self.call("close_sender", self.sender)
        self.call("close_receiver", self.receiver)
        self.call("finalize", self.instance)


def messages_arrive_in_order(plugin: str) -> None:
    """Of many sizes, more than are under way at once, each into a buffer with room to spare."""
    me = NetRank(plugin, {})
    files = len(os.listdir("/proc/self/fd"))
    sizes = [0, 1, 7, 65536, 262_145, 1_500_000, 13] * 20
    room = max(sizes) + 64
    sent = me.add_memory(me.sender, 8 * room)
    got = me.add_memory(me.receiver, 8 * room)
    before, random = (me.rank - 1) % me.num_ranks, np.random.default_rng
    sends: list[Any] = []
    receives: list[Any] = []
    for number, size in enumerate(sizes):
        at = number % 8 * room
        if number >= 8:  # the place is taken
            assert me.wait(sends[number - 8]) == sizes[number - 8]
            check(me, got[0], receives, number - 8, sizes, room, before)
        got[0][at : at + room] = 255
        receives.append(me.receive(got, at, room))
        sent[0][at : at + size] = random([me.rank, number]).integers(0, 255, size, np.uint8)
        sends.append(me.send(sent, at, size))
    for number in range(len(sizes) - 8, len(sizes)):
        assert me.wait(sends[number]) == sizes[number]
        check(me, got[0], receives, number, sizes, room, before)
    expected = dict(zip(NET_COUNTERS, (len(sizes), sum(sizes), 0), strict=True))
    assert net_counters(plugin) == expected
    me.gather(None)
    assert len(os.listdir("/proc/self/fd")) == files
    me.close()


def check(
    me: NetRank, got: np.ndarray, receives: list[Any], number: int, sizes: list[int], room: int,
    sender: int,
) -> None:  # fmt: skip
    size, at = sizes[number], number % 8 * room
    assert me.wait(receives[number]) == size
    expected = np.random.default_rng([sender, number]).integers(0, 255, size, np.uint8)
    assert (got[at : at + size] == expected).all()
    assert (got[at + size : at + room] == 255).all()


def a_link_takes_its_time(plugin: str) -> None:
    """At least that, also on a busy machine; a message waits for its receiver."""
    size = 500_000
    me = NetRank(plugin, {"RMA_LOOP_GBPS": "0.004", "RMA_LOOP_LATENCY_US": "30000"})
    sent, got = me.add_memory(me.sender, 4 * size), me.add_memory(me.receiver, 4 * size)
    start = min(me.gather(time.monotonic()))
    sends = [me.send(sent, i * size, size) for i in range(4)]
    time.sleep(0.1)
    assert [me.size_of(request) for request in sends] == [None] * 4
    receives = [me.receive(got, i * size, size) for i in range(4)]
    assert [me.wait(request) for request in receives + sends] == [size] * 8
    took = max(me.gather(time.monotonic())) - start
    assert took > 4 * size / 4e6 + 0.03
    me.close()


def what_is_wrong_is_an_error(plugin: str) -> None:
    me = NetRank(plugin, {})
    sent, got = me.add_memory(me.sender, 100), me.add_memory(me.receiver, 100)
    with pytest.raises(PluginError, match=str(INVALID_USAGE)):
        me.call("receive", me.receiver, 2, None, None, None, None, None, None)
    requests = [me.receive(got, 0, 10) for _ in range(MAX_UNDER_WAY)]
    assert all(requests)
    assert not me.receive(got, 0, 10)  # too many
    request = me.send(sent, 0, 11)  # larger than its place
    with pytest.raises(PluginError, match=str(SYSTEM_ERROR)):
        me.wait(request)
    assert not got[0].any()
    me.close()


server = closed(lambda: ForkServer("test_net_loop"), "module")


@pytest.mark.parametrize(
    ("scenario", "num_ranks"),
    [
        ("messages_arrive_in_order", 1),
        ("messages_arrive_in_order", 3),
        ("a_link_takes_its_time", 2),
        ("what_is_wrong_is_an_error", 2),
    ],
)
def test_the_network(scenario: str, num_ranks: int, server: ForkServer) -> None:
    function = (f"test_net_loop:{scenario}", [str(build())])
    ended = server.run(*function, num_ranks, patient(60.0))
    assert [end.exit_code for end in ended] == [0] * num_ranks, [end.output for end in ended]
