"""RankPool: processes of this node that stay alive and run functions as ranks of a group."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist
from fork_server import ForkServer
from processes import pretend_host, variables_of_job
from torch._C._distributed_c10d import TCPStore

from megatron_ncclep.ranks.launch import RankContext, collect, join, loopback_store
from megatron_ncclep.ranks.launch import RankError as RankError

# Signals a rank to write its stacks to stderr, and how long that may take: they do so in turns.
DUMP, DUMP_S = signal.SIGUSR1, 0.2


class RankPool:
    """Up to `size` processes in one group, started once because starting is slow.

    A function runs on the first R of them, over a group of just these.  When it raises on a rank,
    or a rank dies or is late, the whole pool is killed: the groups of a failed job are useless to
    the next one.  The next `run` starts new processes.  Late ranks first write where they are to
    stderr: the stacks of all their threads.

    The ranks are forks of one process and share its imports, which outlives them: new ones import
    nothing.  Pools can have that process in common.

    With the backend nccl, ranks share GPUs if there are fewer GPUs and NCCL allows it
    (`ranks.topology.use_gpu`).  With `hosts` above 1, NCCL and this package treat the
    ranks as being on that many hosts, with an equal number of neighbours on each.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        hosts: int = 1,
        imports: ForkServer | None = None,
    ) -> None:
        """`imports`: another pool's, instead of a process that calls `prepare`."""
        self.size = size
        self.hosts = hosts
        self.backend = backend
        self.environment = dict(environment or {})
        self.imports = imports or ForkServer(prepare, **self.environment)
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
            job = _packed((function, args, ranks))
            for pipe in self._pipes[:ranks]:
                with contextlib.suppress(ConnectionError):  # it has died since: there is no answer
                    pipe.send_bytes(job)
            # Tensors of a GPU arrive on the CPU: this process does not use GPUs.
            receive = partial(_receive, device="cpu")
            return collect(self._pipes[:ranks], receive, timeout, self._dump)
        except BaseException:
            self._end_ranks()  # a late answer would be taken for that of the next job
            raise

    def close(self) -> None:
        """Kill the processes of this pool.  A later `run` starts new ones."""
        self._end_ranks()
        if self._has_own_imports:
            self.imports.close()

    def _start(self) -> None:
        # As in torchrun, this process holds the store in which ranks meet: it takes a free port, so
        # no other process can take that port before rank 0 has started.
        self._store = loopback_store()
        variables = {**self.environment, **variables_of_job(self.size, self._store.port)}
        with contextlib.ExitStack() as ends:
            ours, theirs = zip(*(Pipe() for _ in range(self.size)), strict=True)
            self._pipes = list(ours)
            for pipe in theirs:
                ends.enter_context(pipe)
            job = ("rank_pool:be_rank", (self.backend, self.hosts), [None] * self.size)
            self._ranks = self.imports.fork(*job, theirs, GLOO_SOCKET_IFNAME="lo", **variables)

    def _dump(self, some_are_late: bool) -> None:
        """Have ranks write where they are, if some are late."""
        for rank, process in enumerate(self._ranks if some_are_late else ()):
            print(f"--- rank {rank} ---", file=sys.stderr, flush=True)
            os.kill(process, DUMP)  # none is reaped before `_end_ranks`
            time.sleep(DUMP_S)

    def _end_ranks(self) -> None:
        """Kill the ranks, and wait for their end."""
        if self._ranks:
            self.imports.end(self._ranks)
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes, self._store = [], [], None


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


def be_rank(pipe: Connection, backend: str, hosts: int) -> None:
    """Run jobs until the pool closes its end of the pipe, and end this process."""
    faulthandler.register(DUMP)
    rank, size, status = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 1
    try:
        if hosts > 1:
            pretend_host(rank, size // hosts)
        world = join(backend)
        groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
        answer_jobs(rank, groups, world.device, pipe)
        status = 0
    except BaseException:
        with contextlib.suppress(ConnectionError):  # the pool is gone
            pipe.send_bytes(_packed((False, traceback.format_exc())))  # the answer to its first job
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # groups that have failed may wait in their destructors


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
