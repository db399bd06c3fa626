"""The stand-in for NCCL, with a stand-in for the driver: one memory at every rank's addresses."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from virtual_pool import compile_stand_in, cuda_headers

from megatron_ncclep.libraries import extension

FOLDER = Path(__file__).parent
NUM_RANKS = 3
NUM_BYTES = 3 * 2**20 + 4096
GRANULARITY = 2 * 2**20  # of the stand-in for the driver
HEAD = struct.Struct("<QQiiI4x")  # host side, flat base, LSA rank, world rank, stride / 2^32
REMOTE_ERROR = 6

pytestmark = [
    pytest.mark.any_python("it calls libraries in C++"),
    pytest.mark.skipif(
        cuda_headers() is None or extension.obstacle() is not None,
        reason="there is no CUDA toolkit with cuda.h, or no extension",
    ),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("virtual")
    paths = folder / "libvirtual_nccl.so", folder / "libfake_cuda.so"
    compile_stand_in(paths[0])
    compile_stand_in(paths[1], FOLDER / "fake_cuda.c")
    return paths


def run(libraries: tuple[Path, Path], function: Callable[..., None]) -> None:
    """Call a function of this file in a process of its own, which loads the driver anew."""
    stand_in, driver = map(str, libraries)
    done = subprocess.run(
        [sys.executable, __file__, function.__name__, stand_in, driver],
        env={**os.environ, "VIRTUAL_CUDA_LIBRARY": driver, "VIRTUAL_NCCL_DEADLINE_S": "1"},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Rank:
    """NCCL's calls of one rank, by the extension where it has them."""

    def __init__(self, native: Any, path: str, unique_id: bytes, rank: int) -> None:
        self.nccl = native.Nccl(path)
        self.communicator = native.Communicator(self.nccl, unique_id, NUM_RANKS, rank)
        self.library = ctypes.CDLL(path)
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        identity = UniqueId()
        ctypes.memmove(ctypes.byref(identity), unique_id[::-1], 128)  # another world, for ctypes
        assert not self.library.ncclCommInitRank(
            ctypes.byref(self.handle), NUM_RANKS, identity, rank
        )
        self.rank = rank

    def call(self, name: str, *args: Any) -> str:
        """What is wrong; empty when nothing is."""
        if getattr(self.library, name)(*args) == 0:
            return ""
        text: bytes = self.library.ncclGetLastError(None)
        return text.decode()


def on_ranks(stand_in: str, function: Callable[[Rank], Any]) -> list[Any]:
    native = extension.load()
    unique_id = native.Nccl(stand_in).unique_id()
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(
            threads.map(
                lambda rank: function(Rank(native, stand_in, unique_id, rank)), range(NUM_RANKS)
            )
        )


def windows(stand_in: str, driver: str) -> None:
    device = ctypes.CDLL(driver)
    streams = (ctypes.c_void_p * 4)()
    assert ctypes.CDLL(stand_in).virtual_streams(4, streams) == 0
    assert len({stream for stream in streams if stream}) == 4

    def on_rank(me: Rank) -> None:
        assert me.nccl.version == 23007
        assert me.communicator.lsa_size == NUM_RANKS
        for turn in range(2):  # again, after all is given back
            memory, window = ctypes.c_void_p(), ctypes.c_void_p()
            assert not me.call("ncclMemAlloc", ctypes.byref(memory), ctypes.c_size_t(NUM_BYTES))
            assert ctypes.string_at(memory, 3) == b"\xa5" * 3  # whoever relies on zeros fails
            size = ctypes.c_size_t(NUM_BYTES)
            register = (me.handle, memory, size, ctypes.byref(window), 1)
            assert not me.call("ncclCommWindowRegister", *register)
            head = ctypes.string_at(window, HEAD.size)
            peers = extension.load().window_peers(head, me.rank, NUM_RANKS)
            _, base, _, _, stride = HEAD.unpack(head)
            assert stride == 1
            assert peers == [base + (r << 32) for r in range(NUM_RANKS)]
            # What a rank writes in its own memory, at either end, the others read at its address.
            last = NUM_BYTES - 1
            for place in (0, last):
                ctypes.memset(memory.value + place, 100 * turn + me.rank, 1)
            bound = UniqueId()  # a meeting of all ranks
            ctypes.memset(ctypes.byref(bound), 7 + turn, 128)
            other = ctypes.c_void_p()
            args = (ctypes.byref(other), NUM_RANKS, bound, me.rank)
            assert not me.call("ncclCommInitRank", *args)
            for r, peer in enumerate(peers):
                for place in (0, last):
                    assert ctypes.string_at(peer + place, 1) == bytes([100 * turn + r])
            assert not me.call("ncclCommDestroy", other)
            assert not me.call("ncclCommWindowDeregister", me.handle, window)
            assert not me.call("ncclMemFree", memory)
        me.communicator.close()

    on_ranks(stand_in, on_rank)
    assert (device.fake_num_mapped(), device.fake_num_created()) == (0, 0)


def test_every_rank_reads_what_the_others_wrote(libraries: tuple[Path, Path]) -> None:
    run(libraries, windows)


def failures(stand_in: str, driver: str) -> None:
    device = ctypes.CDLL(driver)

    def too_different(me: Rank) -> str:
        memory, window = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(NUM_BYTES + 4096 * me.rank)
        assert not me.call("ncclMemAlloc", ctypes.byref(memory), size)
        return me.call("ncclCommWindowRegister", me.handle, memory, size, ctypes.byref(window), 1)

    for text in on_ranks(stand_in, too_different):
        assert "different sizes" in text

    def comes_never(me: Rank) -> str:
        memory, window = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(NUM_BYTES)
        assert not me.call("ncclMemAlloc", ctypes.byref(memory), size)
        if me.rank == 1:
            return ""
        return me.call("ncclCommWindowRegister", me.handle, memory, size, ctypes.byref(window), 1)

    first, second, third = on_ranks(stand_in, comes_never)
    assert second == ""
    for text in (first, third):
        assert "ncclCommWindowRegister: 2 of 3 ranks came within 1" in text, text

    def has_no_memory(me: Rank) -> str:
        memory = ctypes.c_void_p()
        return me.call("ncclMemAlloc", ctypes.byref(memory), ctypes.c_size_t(NUM_BYTES))

    device.fake_fail_creations(1)
    for text in on_ranks(stand_in, has_no_memory):
        assert text == "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"


def test_what_goes_wrong_is_an_error_on_every_rank(libraries: tuple[Path, Path]) -> None:
    run(libraries, failures)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
