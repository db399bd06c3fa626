"""Start a program as ranks that appear on several hosts, and end all of them in time.

The ranks are processes of this machine, as under torchrun, except that NCCL_HOSTID differs from
host to host.  They run under MPS, because they share GPUs where there are fewer of them than ranks,
and because the test network copies in a context of its own: without MPS, a GPU would run the copies
and the kernels that wait for them in turns of 2 ms.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gpu

# The other ranks have so long once one has failed, and all to dump their stacks.
GRACE_S, DUMP_S = 15.0, 5.0
POLL_S = 0.1


@dataclass(frozen=True)
class Grid:
    """Hosts, and ranks on each."""

    hosts: int
    ranks_on_each: int

    @property
    def ranks(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.ranks_on_each

    def __str__(self) -> str:
        return f"{self.hosts} x {self.ranks_on_each}"

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What tells a rank its place; rank 0 listens on `port`."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank),  # all of them are on this machine
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host{rank // self.ranks_on_each}",
        }


def run_ranks(
    grid: Grid,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    gpus: Sequence[str],
) -> str:
    """Run `command` on every rank; return what went wrong, or "".

    Args:
        grid: the ranks.
        command: what each runs.
        environment: variables besides this process's and those of `Grid.environment`.
        log: file for the output of all.
        limit_s: seconds for all of them together.
        gpus: of this machine, as in CUDA_VISIBLE_DEVICES; none: the ranks use the CPU.
    """
    common = {
        **os.environ,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",  # stacks at SIGABRT
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **environment,
    }
    with log.open("w") as file, gpu.mps(bool(gpus), common) as common:
        port = free_port()
        ranks = [
            subprocess.Popen(
                command,
                cwd=gpu.ROOT,
                env={**common, **grid.environment(rank, port)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(grid.ranks)
        ]
        try:
            return _wait(ranks, limit_s)
        finally:
            _end(ranks)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Wait for all ranks, for a while only once one has failed; what went wrong."""
    until, failed = time.monotonic() + limit_s, False
    while None in (states := [rank.poll() for rank in ranks]):
        if not failed and any(states):
            failed, until = True, min(until, time.monotonic() + GRACE_S)
        if time.monotonic() > until:
            break
        time.sleep(POLL_S)
    problems = []
    for number, rank in enumerate(ranks):
        if rank.returncode is None:
            problems.append(f"rank {number} was stopped")
        elif rank.returncode:
            problems.append(f"rank {number} ended with {rank.returncode}")
    return ", ".join(problems)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, with their stacks in the log."""
    late = [rank for rank in ranks if rank.poll() is None]
    for rank in late:
        rank.send_signal(signal.SIGABRT)
    until = time.monotonic() + DUMP_S
    for rank in late:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, until - time.monotonic()))
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
