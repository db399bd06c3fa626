"""A rank that calls a plugin of the test network as NCCL does, through its table of functions.

Memory is the host's; tests/gpu has the tests with that of a GPU.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

# Kinds of arguments: (p)ointer, (i)nt, (I) and (Q) unsigned of 32 and 64 bits, (?) bool.
TYPES = {
    "p": ctypes.c_void_p, "i": ctypes.c_int, "I": ctypes.c_uint32, "Q": ctypes.c_uint64,
    "?": ctypes.c_bool,
}  # fmt: skip
HOST = 1  # kind of memory
SAFETY_S = 60.0


class PluginError(Exception):
    """A function of the plugin returned an error; its number is the first argument."""


def error_of(call: Callable[..., Any], *arguments: Any) -> int:
    """The number of the error that a call ends with; 0: none."""
    try:
        call(*arguments)
    except PluginError as error:
        return error.args[0]
    return 0


def wait(find: Callable[[], Any]) -> Any:
    """What `find` returns, as soon as it does not return None."""
    give_up = time.monotonic() + SAFETY_S
    while (found := find()) is None:
        assert time.monotonic() < give_up
        time.sleep(1e-4)  # there may be fewer cores than ranks
    return found


class PluginRank:
    """One rank of a job over a plugin.

    Args:
        plugin: its path.
        symbol: of its table.
        table: the functions in it by name, with the kinds of their arguments.
        link: variables of this rank's link (link.h).
    """

    def __init__(
        self, plugin: str, symbol: str, table: dict[str, str], link: dict[str, str]
    ) -> None:
        os.environ.update(link)
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._gathered, self._functions = 0, table
        pointers = ctypes.c_void_p * (1 + len(table))
        self._table = pointers.in_dll(ctypes.CDLL(plugin), symbol)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; collective."""
        self._gathered += 1
        self._store.set(f"{self._gathered}/{self.rank}", pickle.dumps(value))
        ranks = range(self.num_ranks)
        return [pickle.loads(self._store.get(f"{self._gathered}/{rank}")) for rank in ranks]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the table, or raise PluginError."""
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *(TYPES[kind] for kind in self._functions[name]))
        function = prototype(self._table[1 + list(self._functions).index(name)])
        if result := function(*arguments):
            raise PluginError(result, name)

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function whose last argument is where it leaves what it makes."""
        made = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(made))
        return made

    def listen(self, instance: ctypes.c_void_p) -> tuple[ctypes.c_void_p, list[Any]]:
        """A listener, and the handles of those of all ranks; collective."""
        handle, listener = ctypes.create_string_buffer(128), ctypes.c_void_p()
        self.call("listen", instance, 0, handle, ctypes.byref(listener))
        return listener, [ctypes.create_string_buffer(raw, 128) for raw in self.gather(handle.raw)]
