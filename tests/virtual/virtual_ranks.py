"""Ranks that are threads of this process and share its one GPU: the native engine as it is.

Host code and kernels are the product's own.  What is replaced is what a rank has of its own only
because it is a process:

- NCCL's library, by `virtual_nccl.cpp`: windows are memory of this GPU.
- torch.distributed, by torch's own group of threads (`multi_threaded_pg`).
- The device, as far as calls mean all of it: `torch.cuda.synchronize` waits for the rank's own
  streams, `torch.cuda.Stream` gives it one of its own.
- What the engine would refuse or measure: ranks that share a GPU, and 32 SMs for each of them.

Why ranks do not wait for each other for ever, one for the other's kernel and that one for the
first one's host:

- All kernels that wait run at once: they are launched with at most `MOST_SMS` CTAs together, one of
  which fills an SM; torch's kernels have the other SMs.  Each stream that is used has a hardware
  queue of its own (CUDA_DEVICE_MAX_CONNECTIONS), and all code is loaded before the first kernel
  runs (CUDA_MODULE_LOADING), because loading may wait for all kernels.
- A rank whose kernel waits for another one's has agreed with it on that call.  Whatever the other
  one's host does between agreeing and launching must not wait for the device: it allocates, which
  does not wait, and frees nothing to the driver.  cudaDeviceSynchronize, cudaFree and the making of
  windows come only where the ranks have agreed on another call since, so that every kernel that
  those of other ranks wait for has been launched.  Replays of CUDA graphs are not agreed on;
  between them a rank waits for its own streams only.
- A copy between a tensor and the host's ordinary memory holds a lock of the driver's as long as it
  waits for its stream, and no other thread can launch a kernel or copy meanwhile: if the stream
  waits for that thread's kernel, both wait to the deadline.  So a rank waits for its stream first,
  which holds nothing (`_behind_its_stream`).
- Captures of several threads at a time are begun and ended one after the other, because torch's
  random generators keep a list of them.
- Backward runs in the thread that calls it: autograd's own thread for a device would be one for all
  ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import sys
import threading
import traceback
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from megatron_ncclep.engines import native, native_low_latency, native_obstacle
from megatron_ncclep.libraries import search
from megatron_ncclep.ranks import group, nodes
from megatron_ncclep.ranks.pool import RankContext, answer_jobs

MOST_RANKS = 8
# Fewer than the GPU has: torch's kernels run beside those that wait.
MOST_SMS = 128
# One to work on and two to hand out; all ranks' together have a hardware queue each.
STREAMS_PER_RANK = 3
CONNECTIONS = 32
# Of the process, before CUDA starts.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": str(CONNECTIONS),
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_BINARY_LOADER_THREAD_COUNT": str(min(8, os.cpu_count() or 1)),
}
DEFAULT_NUM_SMS = native_obstacle.DEFAULT_NUM_SMS


class PerThread(threading.local, UserList):  # type: ignore[misc, type-arg]
    """A list of groups for every thread: `check_all` must not raise what another rank has met."""


class Mine(threading.local):
    """What a thread that is a rank has.

    Attributes:
        streams: the first is the one that it works on; empty: this thread is no rank.
    """

    def __init__(self) -> None:
        self.streams: list[torch.cuda.Stream] = []
        self.num_given = 0


class Host:
    """The process whose threads are ranks; made once, before anything in it uses CUDA."""

    def __init__(self, size: int, device: str = "cuda", library: Path | None = None) -> None:
        """Replace what the module's docstring says, in this process.

        Args:
            size: how many ranks there are.
            device: "cpu": no native engine, for tests of this harness.
            library: the compiled `virtual_nccl.cpp`.
        """
        assert size <= MOST_RANKS, f"{size} ranks: at most {MOST_RANKS}"
        self.size, self.device, self.library = size, device, library
        self.store = dist.HashStore()
        self.mine = Mine()
        self._graph_lock = threading.Lock()
        self._stream_handles: list[int] = []
        # Whoever comes out of a wait should not have to wait as long again for the interpreter.
        sys.setswitchinterval(2e-4)
        # Every thread has process groups of its own.
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        multi_threaded_pg._install_threaded_pg()
        replace(group, "_groups", PerThread())
        replace(group.EpGroup, "wait", wait)
        replace(multi_threaded_pg.ProcessLocalGroup, "pg_name", property(name_of))
        replace(nodes, "_make_group", GroupOfNode)
        if device == "cuda":
            self._replace_what_means_the_device()
            self._start_cuda()

    def _replace_what_means_the_device(self) -> None:
        """Product and torch; touches no GPU."""
        at_home = group.EpGroup.__init__

        def init(self: group.EpGroup, *args: Any) -> None:
            at_home(self, *args)
            self.device = torch.device("cuda", 0)

        replace(group.EpGroup, "__init__", init)
        replace(native_obstacle, "_group_obstacle", lambda places: None)
        # A process of its own each time, for every rank of every engine.
        replace(search, "_probe", functools.cache(search._probe))
        replace(multi_threaded_pg, "Collective", OnOneDevice)
        replace(torch.cuda, "synchronize", self._synchronize(torch.cuda.synchronize))
        replace(torch.cuda, "Stream", self._new_stream(torch.cuda.Stream))
        replace(torch.cuda, "graph", self._capture)
        for name in ("cpu", "item", "to", "tolist"):
            replace(torch.Tensor, name, _behind_its_stream(getattr(torch.Tensor, name)))

    def _start_cuda(self) -> None:
        assert not torch.cuda.is_initialized(), "the environment comes before CUDA"
        assert self.library is not None
        os.environ.update(ENVIRONMENT, NCCLEP_NCCL_LIBRARY=str(self.library))
        stand_in = ctypes.CDLL(str(self.library))
        handles = (ctypes.c_void_p * (self.size * STREAMS_PER_RANK))()
        stand_in.ncclGetLastError.restype = ctypes.c_char_p
        if stand_in.virtual_streams(len(handles), handles) != 0:
            raise RuntimeError(f"virtual_streams: {stand_in.ncclGetLastError(None).decode()}")
        self._stream_handles = [int(handle or 0) for handle in handles]
        torch.cuda.init()
        has = torch.cuda.get_device_properties(0).multi_processor_count
        assert has > MOST_SMS, f"virtual ranks need more than {MOST_SMS} SMs, this GPU has {has}"

    # --- one rank ---------------------------------------------------------------------------------

    def become(self, rank: int) -> dict[int, dist.ProcessGroup]:
        """Make this thread a rank; return its group of the first N ranks by N.  Collective."""
        torch.autograd.set_multithreading_enabled(False)
        if self.device == "cuda":
            torch.cuda.set_device(0)
            first = rank * STREAMS_PER_RANK
            self.mine.streams = [
                torch.cuda.ExternalStream(handle, device=torch.device("cuda", 0))
                for handle in self._stream_handles[first : first + STREAMS_PER_RANK]
            ]
            torch.cuda.set_stream(self.mine.streams[0])
        dist.init_process_group("threaded", rank=rank, world_size=self.size, store=self.store)
        return {n: dist.new_group(list(range(n))) for n in range(1, self.size + 1)}

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(context, *args)` as every rank of this process; once in its life.

        A rank that raises ends the process: others may be waiting for it where there is no
        deadline.

        Returns:
            what the ranks returned.
        """
        results: list[Any] = [None] * self.size

        def be(rank: int) -> None:
            try:
                groups = self.become(rank)
                ctx = RankContext(rank, self.size, groups[self.size], self.device)
                results[rank] = on_rank(ctx, function, *args)
            except BaseException:
                traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)

        threads = [threading.Thread(target=be, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def serve(self, rank: int, pipe: Connection) -> None:
        """Be a rank of a `VirtualPool`, to the end of the process."""
        try:
            groups = self.become(rank)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the pool sees a pipe that ends
        answer_jobs(rank, groups, self.device, pipe)

    # --- what replaces functions of torch.cuda ----------------------------------------------------

    def _synchronize(self, original: Callable[..., None]) -> Callable[..., None]:
        def synchronize(device: Any = None) -> None:
            for stream in self.mine.streams:
                stream.synchronize()
            if not self.mine.streams:
                original(device)

        return synchronize

    def _new_stream(self, original: type[torch.cuda.Stream]) -> type[torch.cuda.Stream]:
        mine = self.mine

        class Stream(original):  # type: ignore[misc, valid-type]
            def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
                if known or not mine.streams:  # `known`: one that there is
                    return original(device, priority, **known)
                others = mine.streams[1:]
                mine.num_given += 1
                return others[mine.num_given % len(others)]

        return Stream

    @contextmanager
    def _capture(
        self, graph: torch.cuda.CUDAGraph, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """What torch.cuda.graph does, less freeing memory."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            with self._graph_lock:
                graph.capture_begin(capture_error_mode=capture_error_mode)
            try:
                yield
            finally:
                with self._graph_lock:
                    graph.capture_end()


def _behind_its_stream(copy: Callable[..., Any]) -> Callable[..., Any]:
    """What `copy`, a method of a tensor, does, once its stream has nothing to do any more.

    One that stays where it is, such as `to` with a dtype, waits for nothing: it may be captured.
    """

    @functools.wraps(copy)
    def copies(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        moves = tensor.is_cuda
        if copy.__name__ == "to":
            device = torch._C._nn._parse_to(*args, **named)[0]
            moves = device is not None and (device.type == "cuda") != tensor.is_cuda
        if moves:
            torch.cuda.current_stream().synchronize()
        return copy(tensor, *args, **named)

    return copies


class OnOneDevice(multi_threaded_pg.Collective):
    """A collective that one thread does for all, after what the others' streams hold."""

    def __init__(self, world_size: int, collective: Any, pg: Any) -> None:
        super().__init__(world_size, Synchronized(collective), pg)

    def join(self, rank: int, data: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        return super().join(rank, data)


class Synchronized:
    """A collective's work, done when it returns."""

    def __init__(self, collective: Any) -> None:
        self.collective = collective

    def work(self, data: Any) -> None:
        self.collective.work(data)
        torch.cuda.current_stream().synchronize()


def wait(
    self: group.EpGroup, start: Callable[[dist.ProcessGroup], Any], what: str, timeout_s: float
) -> None:
    """What EpGroup.wait does, for a group whose collectives are over when they return.

    They have no deadline, and their work cannot wait with one: the pool ends ranks that hang.
    """
    start(self.process_group).wait()


class GroupOfNode(multi_threaded_pg.ProcessLocalGroup):
    """A group that torch does not list: `nodes._make_group` for threads."""

    def __init__(self, device: str, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = name

    @property
    def pg_name(self) -> str:
        return self._name


def name_of(group_of_threads: Any) -> str:
    """The name of torch's group, after torch has destroyed it too: it asks for it then."""
    names = group_of_threads._world().pg_names
    if group_of_threads in names:
        group_of_threads.known_name = names[group_of_threads]
    return str(group_of_threads.known_name)


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute that is there: one that has gone would be replaced without effect."""
    assert hasattr(owner, name), f"{owner} has no {name} any more, which virtual ranks replace"
    setattr(owner, name, value)


def num_sms(num_ranks: int) -> int:
    """SMs of each rank, so that all of them fit on the GPU at once."""
    return min(DEFAULT_NUM_SMS, MOST_SMS // num_ranks)


def on_rank(ctx: RankContext, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` on a rank with its share of the SMs; leave nothing under way."""
    for module in (native, native_obstacle):
        replace(module, "DEFAULT_NUM_SMS", num_sms(ctx.num_ranks))
    replace(native_low_latency, "DEFAULT_MOST_CTAS", num_sms(ctx.num_ranks))
    try:
        return function(ctx, *args)
    finally:
        if ctx.device == "cuda":
            torch.cuda.synchronize()


def serve(
    pipes: Sequence[Connection],
    device: str,
    library: Path | None,
    stacks: Path,
    signal_number: int,
    path: list[str],
) -> None:
    """The process of a `VirtualPool`.

    Args:
        pipes: of the ranks.
        stacks: file for the stacks of all threads, when `signal_number` comes or it crashes.
        path: Python's.
    """
    sys.path[:] = path
    file = stacks.open("w")
    os.dup2(file.fileno(), 2)  # whatever anybody says is told when a rank fails
    faulthandler.enable(file)
    faulthandler.register(signal_number, file, all_threads=True)
    torch.set_num_threads(1)
    host = Host(len(pipes), device, library)
    threads = [
        threading.Thread(target=host.serve, args=(rank, pipe), name=f"rank {rank}", daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
