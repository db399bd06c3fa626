"""Starts ranks on this machine that run one function: for `ncclep bench` and `ncclep doctor`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatron_ncclep.libraries.tested import numbers
from megatron_ncclep.ranks import topology

# Seconds that the other ranks have to answer once one has failed.  If all ranks fail, all of them
# answer within moments, even on a busy machine.  A rank that waits in a collective for the failed
# one has nothing to add, and its own deadline may be minutes away.
GRACE_S = 10.0


@dataclass(frozen=True)
class RankContext:
    """The first argument of a function that runs on a rank, as on all others of the `group`.

    Attributes:
        device: where the group's backend needs its tensors, "cpu" or "cuda".
    """

    rank: int
    num_ranks: int
    group: dist.ProcessGroup
    device: str


class RankError(AssertionError):
    """A function raised on a rank, or a rank died or did not answer in time."""


class LocalRanks:
    """Processes of this machine that run `function(context, send, *args)` as ranks of one group.

    What the ranks pass to `send` is received here.  Use it in a `with`, which kills what is left.

    Args:
        num_ranks: R.
        backend: "gloo", or "nccl": ranks share GPUs if there are fewer and NCCL allows it.
        function, args: what each rank runs; the processes import it by its name.
        prepare: what each rank calls before it makes its process group.
    """

    def __init__(
        self,
        num_ranks: int,
        backend: str,
        function: Callable[..., None],
        *args: Any,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        # As in torchrun, this process holds the store in which ranks meet: it takes a free port, so
        # no other process can take that port before rank 0 has started.
        self._store = loopback_store()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            environment = variables(rank, num_ranks, self._store.port)
            process = context.Process(
                target=_be_rank,
                args=(theirs, backend, environment, prepare, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the end of a rank is the end of its pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def receive(self, timeout: float) -> list[Any]:
        """What each rank sends next, in the order of ranks.

        `timeout`: seconds for all of them together.  Once one has failed, the others have at most
        `GRACE_S`.

        Raises:
            RankError: with the traceback of each rank that raised, and the ranks that died or sent
                nothing.
        """
        return collect(self._pipes, Connection.recv, timeout)


def collect(
    pipes: Sequence[Connection],
    receive: Callable[[Connection], tuple[bool, Any]],
    timeout: float,
    before_failing: Callable[[bool], None] = lambda some_are_late: None,
) -> list[Any]:
    """An answer from each rank: whether it succeeded, and its result or traceback.

    `pipes`: to the ranks, in their order; `receive`: reads an answer of one; `before_failing`: is
    called when there is an error, with whether ranks are late.  Otherwise as `LocalRanks.receive`.
    """
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    answers: dict[int, Any] = {}
    dead: list[int] = []
    raised: dict[int, str] = {}
    deadline, allowed = time.monotonic() + timeout, f"{timeout:g} s"
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in set(waiting).intersection(ready):
            rank = waiting.pop(pipe)
            try:
                succeeded, answer = receive(pipe)
            except (EOFError, ConnectionError):
                dead.append(rank)
            else:
                (answers if succeeded else raised)[rank] = answer
            if rank not in answers and time.monotonic() + GRACE_S < deadline:
                deadline = time.monotonic() + GRACE_S
                allowed = f"{GRACE_S:g} s after rank {rank} had failed"
    if dead or waiting or raised:
        before_failing(bool(waiting))
        failures = [f"rank {rank} died" for rank in sorted(dead)]
        failures += [f"rank {rank} did not answer within {allowed}" for rank in waiting.values()]
        failures += [f"--- rank {rank} ---\n{raised[rank]}" for rank in sorted(raised)]
        raise RankError("\n" + "\n".join(failures))
    return [answers[rank] for rank in range(len(pipes))]


def loopback_store() -> TCPStore:
    """Make a store in which ranks of this machine meet; it takes a free port.

    torch's own listens on every interface, and what is in it leads to connections over which ranks
    receive pickled objects, which can run any code: only this machine may reach it.
    """
    host = "127.0.0.1"
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # Torch's default, as under torchrun; up to torch 2.6 that server accepts no socket.
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=numbers(torch.__version__) >= (2, 7),
    )


def variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """torchrun's environment of a rank of this machine, whose store is at `port` of it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _be_rank(
    pipe: Connection,
    backend: str,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Run the function as a rank, and send what it raises."""
    # Without the first, gloo is reached at the address of this machine's name.
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment})
    torch.set_num_threads(1)
    try:
        if prepare is not None:
            prepare()
        context = join(backend)
        function(context, lambda value: pipe.send((True, value)), *args)
    except BaseException:
        with contextlib.suppress(ConnectionError):  # nobody is there
            pipe.send((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no destructor of a group may wait for a rank that has failed


def join(backend: str) -> RankContext:
    """Be the rank that this process's environment names, over "gloo" or "nccl".  Collective."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        topology.use_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    assert dist.group.WORLD is not None  # just made
    return RankContext(rank, size, dist.group.WORLD, device)
