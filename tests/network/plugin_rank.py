"""A rank that calls a plugin of the test network as NCCL does, through its table of functions.

Memory is the host's, or that of a stand-in for a GPU where RMA_LOOP_DRIVER is set.
"""

from __future__ import annotations

import ctypes
import os
import pickle
from typing import Any

import numpy as np
from torch.distributed import TCPStore

# Kinds of arguments: (p)ointer, (i)nt, (I) and (Q) unsigned of 32 and 64 bits, (?) bool.
TYPES = {
    "p": ctypes.c_void_p, "i": ctypes.c_int, "I": ctypes.c_uint32, "Q": ctypes.c_uint64,
    "?": ctypes.c_bool,
}  # fmt: skip
HOST, GPU = 1, 2


class PluginError(Exception):
    """A function of the plugin returned an error; its number is the first argument."""


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
        driver = os.environ.get("RMA_LOOP_DRIVER")
        self.driver = ctypes.CDLL(driver) if driver else None
        if self.driver is not None:
            self.driver.fake_allocate.restype = ctypes.c_void_p
            self.driver.fake_allocate.argtypes = [ctypes.c_size_t, ctypes.c_bool]
        # Bytes need not pass the memory of the host.
        self.is_direct = self.driver is not None and "RMA_LOOP_STAGED" not in os.environ
        self.plugin, self.rank = plugin, int(os.environ["RANK"])
        self.num_ranks, self._gathered = int(os.environ["WORLD_SIZE"]), 0
        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._functions = table
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

    def allocate(
        self, num_bytes: int, is_shared: bool = True, kind: int | None = None
    ) -> tuple[np.ndarray, int]:
        """New memory, and its kind.

        Args:
            is_shared: another process can map it, if it is a GPU's.
            kind: default: a GPU's, if there is one.
        """
        kind = kind or (HOST if self.driver is None else GPU)
        if kind == HOST:
            return np.zeros(num_bytes, np.uint8), kind
        assert self.driver is not None
        # It is a part of an allocation.
        memory = self.driver.fake_allocate(num_bytes + 8192, is_shared)
        array = (ctypes.c_uint8 * num_bytes).from_address(memory + 4096)
        return np.frombuffer(array, np.uint8), kind
