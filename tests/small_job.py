"""`ncclep train` as tests run it: jobs of seconds, a small model, and what they logged."""

from __future__ import annotations

import importlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fork_server import ForkServer
from imports import import_megatron_on_cpu
from timeouts import patient

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TIMEOUT_S = patient(600)  # a hung run must end the test; a busy machine must not

MODEL: dict[str, Any] = yaml.safe_load((TESTS / "convergence" / "model.yaml").read_text()) | {
    # So that a resumed run needs the right random numbers.
    "hidden-dropout": 0.1,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 8,
    "eval-iters": 2,
    "eval-interval": 3,
    "lr-warmup-fraction": 0.25,
}


@dataclass(frozen=True)
class Finished:
    """One uninterrupted run with --compare alltoall."""

    arguments: tuple[str, ...]
    out: Path
    output: str


def write_text(path: Path, num_bytes: int = 20_000) -> Path:
    """Write `num_bytes` of words to `path`, the same every time."""
    choose = random.Random(0).choice
    words = ("expert", "token", "router", "rank", "slot", "plan", "dispatch", "combine", "gate")
    text = " ".join(choose(words) for _ in range(num_bytes // 3))
    path.write_text(text[:num_bytes], encoding="utf-8")
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megatron_ncclep", "train", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Variables for this package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def train(*arguments: object) -> str:
    """Run `ncclep train`, which must succeed; return stdout and stderr in one text."""
    done = subprocess.run(
        command(*arguments), env=environment(), text=True, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


class Trainer:
    """Runs `ncclep train` in forks of a process that has imported Megatron-Core, as torchrun would.

    Two ranks of their own, torchrun and the command that starts it take 20 seconds of a core to
    import what they need: more than most jobs here.

    Attributes:
        server: the process that has imported it.
    """

    def __init__(self) -> None:
        self.server = ForkServer("small_job:prepare")

    def train(
        self,
        *arguments: object,
        ranks: int = 2,
        entry: str = "be_rank",
        status: int = 0,
    ) -> str:
        """Run a job and return its output.

        Args:
            arguments: of `ncclep train`.
            ranks: to start, whatever the arguments say.
            entry: the function below that each rank calls.
            status: with which each rank must end.
        """
        command = list(map(str, (*arguments, "--ranks", ranks)))
        ended = self.server.run(f"small_job:{entry}", command, ranks, TIMEOUT_S)
        assert [rank.exit_code for rank in ended] == [status] * ranks, ended
        return "".join(rank.output for rank in ended)

    def close(self) -> None:
        """End the process that forks."""
        self.server.close()


def prepare() -> None:
    """Import what a rank of `ncclep train` needs on a CPU."""
    import_megatron_on_cpu()
    for name in ("matplotlib.figure", "megatron_ncclep.training.loop"):
        importlib.import_module(name)
    # Checkpoints of asynchronous runs pass through a process, which imports torch for each rank;
    # ours are written by the rank itself, as the whole runs of `train` show.
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    assert writer._results_queue is None
    writer._results_queue = queue.SimpleQueue()


def be_rank(*arguments: str) -> int:
    """Be a rank of `ncclep train`."""
    from megatron_ncclep.cli import main

    return main(["train", *arguments])


def be_rank_with_ctrl_c(*arguments: str) -> int:
    """Be one that finds Ctrl-C pressed if it is rank 1."""
    if os.environ["RANK"] == "1":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)
    return be_rank(*arguments)


def be_rank_that_holds_its_last_barrier(*arguments: str) -> int:
    """Be one that says so if its last barrier is still there when it destroys the group."""
    import torch.distributed as dist

    barrier, destroy = dist.barrier, dist.destroy_process_group
    last: list[Any] = []

    def note(**options: Any) -> Any:
        work = barrier(**options)
        last[:] = [weakref.ref(work)] if work is not None else []
        return work

    def end() -> None:
        if last and last[0]() is not None:
            print("the last barrier is held")
        destroy()

    dist.barrier, dist.destroy_process_group = note, end
    return be_rank(*arguments)


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["type"] == kind]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in entries(folder, "step")]
