"""Stands in for what a machine without GPUs lacks: NVIDIA's libraries, ranks with a GPU each."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import Hosts
from megatron_ncclep.ranks.resources import Resources

# tests/test_packaging.py sees to it that there is one wherever there is a CUDA toolkit.
needs_extension = pytest.mark.skipif(
    extension.unavailable_reason() is not None,
    reason=f"nothing to call: {extension.unavailable_reason()}",
)


def compile_fake(path: Path, ep_version: int = 200, nccl_version: int = 23007) -> Path:
    """Compile `fake_nccl.c`, a libnccl and libnccl_ep in one, to `path`.

    The versions are what ncclEpGetVersion and ncclGetVersion are to say.
    """
    defines = [f"-DFAKE_EP_VERSION={ep_version}", f"-DFAKE_NCCL_VERSION={nccl_version}"]
    source = Path(__file__).with_name("fake_nccl.c")
    command = ["cc", "-shared", "-fPIC", *defines, source, "-o", path]
    subprocess.run(command, check=True, timeout=300)
    return path


class Recorder:
    """The calls that the library of `compile_fake` got from this process."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.fake_calls.restype = ctypes.c_char_p
        self.fail_next(0)

    def lines(self) -> list[str]:
        """What was called since the last `lines` or `fail_next`, with the arguments."""
        lines: list[str] = self._library.fake_calls().decode().splitlines()
        self.fail_next(0)
        return lines

    def fail_next(self, result: int) -> None:
        """Have the next call that can fail return `result`."""
        self._library.fake_reset(result)


class ThreadGroup(EpGroup):
    """A rank that is a thread of this process, and has the GPU of its number."""

    _ranks_per_gpu: int | None = 1  # None: the ranks find out

    def __init__(self, rank: int, messages: list[bytes], meeting: threading.Barrier) -> None:
        self.rank, self.size = rank, len(messages)
        self.device = torch.device("cuda", rank)
        of_torch: Any = SimpleNamespace(
            rank=rank, size=self.size, process_group=None, is_alive=True, is_closed=False,
            require_open=lambda: None,
        )  # fmt: skip
        self.torch, self.num_low_latency, self.is_warmup = of_torch, 0, False
        self.hosts = ThreadHosts(of_torch, messages, meeting)
        self.resources = Resources(of_torch, self.hosts)
        self._logged: set[str] = set()
        self._ranks_per_node = [self.size]
        self._is_first_step, self._whole = True, None
        self.exchanged = self.hosts.exchanged


class ThreadHosts(Hosts):
    """The hosts of `ThreadGroup`s.

    Attributes:
        exchanged: what was agreed on.
    """

    def __init__(self, of_torch: Any, messages: list[bytes], meeting: threading.Barrier) -> None:
        super().__init__(of_torch)
        self._rank, self._messages, self._meeting = of_torch.rank, messages, meeting
        self.exchanged: list[str] = []

    def exchange(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        self.exchanged.append(what)
        self._messages[self._rank] = mine
        self._meeting.wait(timeout_s)
        theirs = b"".join(self._messages)
        self._meeting.wait(timeout_s)
        assert len(theirs) == self.size * len(mine), f"ranks in different calls: {what}"
        return theirs


def on_threads(num_ranks: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Call `function` as every rank; return the results, or what was raised, by rank."""
    messages, meeting = [b""] * num_ranks, threading.Barrier(num_ranks)

    def run(rank: int) -> Any:
        try:
            return function(ThreadGroup(rank, messages, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(run, range(num_ranks)))
