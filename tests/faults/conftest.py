"""What starts a job in which a rank goes wrong, and what comes of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import closed
from fork_server import ForkServer
from rank import FAULTS, LONG_S
from timeouts import patient

# What never has to do with a rank that does not come.
CRASHES = ("CUDA error", "illegal memory", "LibraryError")
# Nor do these, unless torch's watchdog has seen NCCL's connection to another host end: then it ends
# the process in a way of its own, while or after the process says what we promise.
ENDED_BY_FORCE = ("terminate called", "Segmentation fault")
WATCHDOG = "failure detected by watchdog"
# Seconds for a whole job, whose processes share a CPU with others.
JOB_S = 3 * LONG_S
# Far above the short deadline, far below LONG_S and torch's own ten minutes.
SOON_S = LONG_S / 2
# Once NCCL has reported an error to one rank, torch's monitors in the others sleep for so long,
# eight minutes unless set, and a process that ends waits for its monitor.
HEARTBEAT = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}
# For what a concurrent job has in /dev/shm for a moment.
MOMENT_S = patient(10.0)


@pytest.fixture(scope="session")
def num_ranks(backend: str, rank_counts: list[int]) -> int:
    """As many as there may be; on a CPU as few as can name another rank than the only other one."""
    return rank_counts[-1] if backend != "gloo" else min(rank_counts[-1], 3)


server = closed(lambda: ForkServer("rank"))


@pytest.fixture
def end_of(
    server: ForkServer, backend: str, engine_name: str, num_ranks: int
) -> Callable[..., list[str]]:
    """Runs a job with a fault; returns what ended each rank as "PeerError: ...", or "".

    Asserted for every rank: it ended by itself, soon after the fault, as an uncaught exception ends
    a program or without any error, and nothing else went wrong.  Only a rank that the fault kills
    is killed, and nothing is left of the job: no process, no shared memory.
    """

    def run(fault: str, **environment: str) -> list[str]:
        before = shared_memory()
        everyone = server.run(
            "rank:main", [backend, engine_name, fault], num_ranks, JOB_S, **HEARTBEAT, **environment
        )
        story = "\n".join(
            f"--- rank {rank}: exit code {ended.exit_code} ---\n{ended.output}"
            for rank, ended in enumerate(everyone)
        )
        texts = []
        what = FAULTS[fault]
        for rank, ended in enumerate(everyone):
            is_watched = WATCHDOG in ended.output
            words = CRASHES if is_watched else (*CRASHES, *ENDED_BY_FORCE)
            crashes = [word for word in words if word in ended.output]
            assert not crashes, f"rank {rank}: {crashes}\n{story}"
            text = error_text(ended.output)
            is_ended = what.ends is not None and (what.ends_all or rank == what.culprit % num_ranks)
            expected = -what.ends if is_ended else 1 if text else 0
            # Python forgets what ended it when an import compiles something meanwhile.
            is_forgotten = what.ends == signal.SIGINT and ended.exit_code == 1
            if not (is_forgotten or (is_watched and text and ended.exit_code)):
                assert ended.exit_code == expected, f"rank {rank}, not {expected}\n{story}"
            if not is_ended:
                took = re.search(r"over after ([\d.]+) s", ended.output)
                assert took, f"rank {rank}\n{story}"
                assert float(took[1]) < SOON_S, f"rank {rank}\n{story}"
            texts.append(text)
        give_up = time.monotonic() + MOMENT_S
        while left := shared_memory() - before:
            assert time.monotonic() < give_up, f"{left} are left in /dev/shm\n{story}"
            time.sleep(MOMENT_S / 100)
        return texts

    return run


def shared_memory() -> set[str]:
    """The files of this package in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir() if "ncclep" in path.name}


def error_text(output: str) -> str:
    """The last line of the last traceback: the error that ended a rank, without its module.

    NCCL's own names, ncclSystemError say, stand in what torch logs of it.
    """
    line = r"^(?:\[rank\d+\]: )?(?!nccl)([\w.]+(?:Error|Interrupt).*)"
    found = re.findall(line, output, re.MULTILINE)
    return found[-1].removeprefix("megatron_ncclep.errors.") if found else ""
