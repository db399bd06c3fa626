"""RankPool: processes of this node that stay alive and run functions as ranks of a group."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.launch import (
    RankContext,
    collect,
    join,
    loopback_store,
    variables,
)
from megatron_ncclep.ranks.launch import RankError as RankError

# Signals a rank to write its stacks to stderr, and how long that may take: they do so in turns.
DUMP, DUMP_S = signal.SIGUSR1, 0.2
IMPORT_S = 600.0  # for what they import, on a slow and busy machine


class RankPool:
    """Up to `size` processes in one group, started once because starting is slow.

    A function runs on the first R of them, over a group of just these.  When it raises on a rank,
    or a rank dies or is late, the whole pool is killed: the groups of a failed job are useless to
    the next one.  The next `run` starts new processes.  Late ranks first write where they are to
    stderr: the stacks of all their threads.

    The ranks are forks of one process and share its imports (`Imports`), which outlives them: new
    ones import nothing.  Pools can have that process in common.

    With the backend nccl, ranks share GPUs if there are fewer GPUs and NCCL allows it
    (`ranks.topology.use_gpu`).  With `hosts` above 1, NCCL and this package treat the
    ranks as being on that many hosts, with an equal number of neighbours on each.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        folders: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        hosts: int = 1,
        imports: Imports | None = None,
    ) -> None:
        """`imports`: another pool's, instead of a process with `folders` and `prepare`."""
        self.size = size
        self.hosts = hosts
        self.backend = backend
        self.environment = dict(environment or {})
        self.imports = imports or Imports(folders, self.environment, prepare)
        self._has_own_imports = imports is None
        self._ranks: list[int] = []  # processes
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 240,
    ) -> list[Any]:
        """Call `function(context, *args)` on the first `ranks` processes; return their results.

        Args:
            function: importable by name.
            args: objects that `torch.save` can write.
            ranks: R; default: all.
            timeout: seconds for all of them together.  Once a rank has failed, the others have at
                most `launch.GRACE_S`.

        Raises:
            RankError: with the traceback of every failed rank, and the ranks that did not answer.
        """
        ranks = ranks or self.size
        try:
            if not self._ranks:
                self._start()
            return self._run(_packed((function, args, ranks)), ranks, timeout)
        except BaseException:
            self._end_ranks()  # a late answer would be taken for that of the next job
            raise

    def _run(self, job: bytes, ranks: int, timeout: float) -> list[Any]:
        """Send a job and collect the answers, as for `run`."""
        for pipe in self._pipes[:ranks]:
            with contextlib.suppress(ConnectionError):  # it has died since: there is no answer
                pipe.send_bytes(job)
        # Tensors of a GPU arrive on the CPU: this process does not use GPUs.
        receive = partial(_receive, device="cpu")
        return collect(self._pipes[:ranks], receive, timeout, self._dump)

    def _dump(self, some_are_late: bool) -> None:
        """Have ranks write where they are, if some are late."""
        for rank, process in enumerate(self._ranks if some_are_late else ()):
            print(f"--- rank {rank} ---", file=sys.stderr, flush=True)
            os.kill(process, DUMP)  # none is reaped before `_end_ranks`
            time.sleep(DUMP_S)

    def close(self) -> None:
        """Kill the processes of this pool.  A later `run` starts new ones."""
        self._end_ranks()
        if self._has_own_imports:
            self.imports.close()

    def _start(self) -> None:
        # As in torchrun, this process holds the store in which ranks meet: it takes a free port, so
        # no other process can take that port before rank 0 has started.
        self._store = loopback_store()
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(self.size)), strict=True)
        self._pipes = list(ours)
        with contextlib.ExitStack() as ends:
            for pipe in theirs:
                ends.enter_context(pipe)
            job = (self.backend, self.hosts, self._store.port, self.environment)
            self._ranks = self.imports.fork(theirs, job)

    def _end_ranks(self) -> None:
        """Kill the ranks, and wait for their end."""
        if self._ranks:
            self.imports.end(self._ranks)
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes, self._store = [], [], None


class Imports:
    """A process with the imports of ranks, which are its forks.

    It puts `folders` in front of this process's import path, has the variables of `environment`,
    and calls `prepare`, which must not use CUDA.  It starts with the first ranks; with it they end.
    """

    def __init__(
        self,
        folders: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.arguments = (list(folders), dict(environment or {}), prepare)
        self._process: Any = None
        self._control: Any = None

    def fork(self, pipes: Sequence[Connection], job: tuple[Any, ...]) -> list[int]:
        """Fork a rank for each pipe, which calls `_be_rank(..., *job)`; return their processes."""
        if self._process is None:
            folders, *others = self.arguments
            context = multiprocessing.get_context("spawn")
            self._control, theirs = context.Pipe()
            self._process = context.Process(
                target=_fork_ranks, args=(theirs, folders + sys.path, *others), daemon=True
            )
            self._process.start()
            theirs.close()
        try:
            self._control.send((len(pipes), job))
            for pipe in pipes:
                send_handle(self._control, pipe.fileno(), self._process.pid)
            if self._control.poll(IMPORT_S):
                ranks: list[int] = self._control.recv()
                return ranks
        except (ConnectionError, EOFError):
            pass
        self.close()
        raise RankError(f"what ranks import ended the process or took longer than {IMPORT_S:g} s")

    def end(self, ranks: Sequence[int]) -> None:
        """Kill ranks, and wait for their end."""
        if self._process is not None:
            try:
                self._control.send(set(ranks))
                self._control.recv()
            except (ConnectionError, EOFError):  # it has died
                self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._control.close()
            self._process.terminate()
            self._process.join()
        self._process = self._control = None


def _packed(values: tuple[Any, ...]) -> bytes:
    """A job, or its answer: whether the function returned, and its result or the traceback.

    This uses torch.save: once Megatron-Core is imported, a tensor that is pickled otherwise names a
    function of Megatron-Core, which every rank would then import.
    """
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _receive(pipe: Connection, device: str | None = None) -> Any:
    """The received object that was `_packed`, its tensors on `device` (None: where they were).

    Raises:
        EOFError: the other end is dead, or was closed.
    """
    return torch.load(io.BytesIO(pipe.recv_bytes()), map_location=device, weights_only=False)


def _fork_ranks(
    control: Connection,
    path: list[str],
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    """Import what ranks need, and fork them whenever `Imports.fork` asks for some."""
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment})
    failure = None
    try:
        if prepare is not None:
            prepare()
    except Exception:
        failure = traceback.format_exc()
    gc.freeze()  # to search what imports have made would take longer than most jobs do
    ranks: set[int] = set()

    def end(some: set[int]) -> None:
        for rank in some:
            os.kill(rank, signal.SIGKILL)
        for rank in some:
            os.waitpid(rank, 0)
            ranks.remove(rank)

    def end_all(*_: Any) -> None:
        end(ranks.copy())
        os._exit(0)

    signal.signal(signal.SIGTERM, end_all)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    while True:
        try:
            what = control.recv()
        except EOFError:
            end_all()
        # The signal waits until the ranks are known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if isinstance(what, set):
            end(what)
            control.send(None)
        else:
            number, job = what
            pipes = [Connection(recv_handle(control)) for _ in range(number)]
            made = []
            for rank in range(number):
                made.append(os.fork())
                if made[rank] == 0:
                    control.close()
                    signal.signal(signal.SIGINT, interrupt)
                    _be_rank(rank, pipes, failure, *job)
            ranks.update(made)
            for pipe in pipes:
                pipe.close()
            control.send(made)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _be_rank(
    rank: int,
    pipes: Sequence[Connection],
    failure: str | None,
    backend: str,
    hosts: int,
    port: int,
    environment: dict[str, str],
) -> None:
    """Run jobs until the pool closes its end of the pipe, and end this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(DUMP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    size, pipe, status = len(pipes), pipes[rank], 1
    for other in pipes:
        if other is not pipe:
            other.close()  # so that the pool notices when that rank dies
    try:
        if failure is not None:
            raise ImportError(failure)
        if hosts > 1:
            pretend_host(rank, size // hosts)
        os.environ.update({**environment, **variables(rank, size, port)})
        world = join(backend)
        groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
        answer_jobs(world.rank, groups, world.device, pipe)
        status = 0
    except BaseException:
        with contextlib.suppress(ConnectionError):  # the pool is gone
            pipe.send_bytes(_packed((False, traceback.format_exc())))  # the answer to its first job
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # exit handlers belong to the process that forked


def pretend_host(rank: int, ranks_on_each: int) -> None:
    """Make this rank's process appear on one of several hosts; call before it uses NCCL."""
    os.environ[topology.HOST_ID] = f"host{rank // ranks_on_each}"


def answer_jobs(
    rank: int, groups: dict[int, dist.ProcessGroup], device: str, pipe: Connection
) -> None:
    """Act as a rank of a pool: run jobs from the pipe until the pool closes its end.

    Args:
        rank: this process's rank.
        groups: the group of the first N ranks, by N.
        device: as in `RankContext`.
        pipe: to the pool.
    """
    while True:
        try:
            function, args, ranks = _receive(pipe)
        except EOFError:
            return
        num_groups = dist.distributed_c10d._world.group_count
        try:
            reply = (True, function(RankContext(rank, ranks, groups[ranks], device), *args))
            # torch counts groups to name them: the next one of all ranks would have two names.
            made = dist.distributed_c10d._world.group_count - num_groups
            assert made == 0 or ranks == len(groups), f"groups of {ranks} of {len(groups)} ranks"
        except BaseException:
            reply = (False, traceback.format_exc())
        pipe.send_bytes(_packed(reply))
