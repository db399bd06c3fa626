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


class RankPool:
    """Up to `size` processes in one group, started once because starting is slow.

    A function runs on the first R of them, over a group of just these.  When it raises on a rank,
    or a rank dies or is late, the whole pool is killed: the groups of a failed job are useless to
    the next one.  The next `run` starts new processes.  Late ranks first write where they are to
    stderr: the stacks of all their threads.

    The ranks are forks of one process and share its imports.  That process puts `folders` in front
    of this process's import path, has the variables of `environment`, and calls `prepare`, which
    must not use CUDA.

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
    ) -> None:
        self.size = size
        self.hosts = hosts
        self.backend = backend
        self.folders = list(folders)
        self.environment = dict(environment or {})
        self.prepare = prepare
        self._process: Any = None
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
        if self._process is None:
            self._start()
        ranks = ranks or self.size
        try:
            return self._run(_packed((function, args, ranks)), ranks, timeout)
        except BaseException:
            self.close()  # a late answer would be taken for that of the next job
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
        if some_are_late and self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, DUMP)
            time.sleep((self.size + 1) * DUMP_S)

    def close(self) -> None:
        """Kill the processes of this pool.  A later `run` starts new ones."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()
        for pipe in self._pipes:
            pipe.close()
        self._process, self._pipes, self._store = None, [], None

    def _start(self) -> None:
        # As in torchrun, this process holds the store in which ranks meet: it takes a free port, so
        # no other process can take that port before rank 0 has started.
        self._store = loopback_store()
        self._start_process(
            _fork_ranks,
            self.backend,
            self.hosts,
            self._store.port,
            self.folders + sys.path,
            self.environment,
            self.prepare,
        )

    def _start_process(self, target: Callable[..., None], *args: Any) -> None:
        """Start a process that calls `target(pipes, *args)`, with a pipe for each rank.

        At SIGTERM it ends, together with the processes that it has started.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = zip(*(context.Pipe() for _ in range(self.size)), strict=True)
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        for pipe in theirs:
            pipe.close()
        self._pipes = list(ours)


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
    pipes: Sequence[Connection],
    backend: str,
    hosts: int,
    port: int,
    path: list[str],
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    """Import what the ranks need, fork them, and wait for their end or for SIGTERM."""
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment})
    try:
        if prepare is not None:
            prepare()
    except Exception:
        for pipe in pipes:
            pipe.send_bytes(_packed((False, traceback.format_exc())))
        return
    gc.freeze()  # to search what imports have made would take longer than most jobs do
    ranks: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        for rank, process in enumerate(ranks):
            if number == DUMP:
                print(f"--- rank {rank} ---", file=sys.stderr, flush=True)
            os.kill(process, DUMP if number == DUMP else signal.SIGKILL)
            time.sleep(DUMP_S if number == DUMP else 0)

    # Signals wait until all ranks are forked and known.
    signals = {signal.SIGTERM, DUMP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for number in signals:
        signal.signal(number, pass_on)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    for rank, pipe in enumerate(pipes):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt)
            faulthandler.register(DUMP)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            for other in pipes:
                if other is not pipe:
                    other.close()  # so that the pool notices when that rank dies
            if hosts > 1:
                pretend_host(rank, len(pipes) // hosts)
            os.environ.update(variables(rank, len(pipes), port))
            _be_rank(len(pipes), backend, pipe)
        ranks.append(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    for pipe in pipes:
        pipe.close()
    for rank in ranks:  # none is reaped while `pass_on` might still signal it
        os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    for rank in ranks:
        os.waitpid(rank, 0)


def _be_rank(size: int, backend: str, pipe: Connection) -> None:
    """Run jobs until the pool closes its end of the pipe, and end this process."""
    status = 1
    try:
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
