"""Train a mixture-of-experts GPT on text with Megatron-Core.

Without --text it trains on the source of the running interpreter's standard library.  Results go to
--out: log.jsonl, loss.png and checkpoint/.  The command starts its ranks itself; under torchrun it
is one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_ncclep.cli import config_files
from megatron_ncclep.config import add_option_arguments, unknown_variables
from megatron_ncclep.error_reporting import first_report
from megatron_ncclep.errors import InputError
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.training.job import DEFAULT_RANKS, DISPATCHERS, Job

# From the extra `[train]`; their own dependencies come with them.
NEEDED = ("megatron.core", "matplotlib", "numpy", "psutil")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ncclep train`."""
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    models = ", ".join(config_files.names("model"))
    model_help = f"model file: {models}, or a path that ends in .yaml (default: tiny)"
    add("--model", default="tiny", metavar="NAME_OR_PATH", help=model_help)
    change_help = "change values of the model file, such as --set num-layers=2 lr=1e-3"
    add("--set", metavar="NAME=VALUE", help=change_help, **several)
    add("--steps", type=int, help="optimizer steps (the file's train-iters)")
    add("--seed", type=int, help="seed of weights and data order (the file's seed)")
    add("--dispatcher", choices=DISPATCHERS, default="ncclep", help="default: ncclep")
    add("--compare", choices=DISPATCHERS, help="also train with this dispatcher, and plot both")
    text_help = "text files or folders, or the prefix of a Megatron .bin/.idx pair"
    add("--text", metavar="PATH", help=text_help, **several)
    add("--out", default="runs/train", help="folder for the results (default: runs/train)")
    add("--resume", action="store_true", help="resume from the checkpoint in --out")
    add("--overwrite", action="store_true", help="replace the run in --out")
    ranks_help = f"processes to start (default: {DEFAULT_RANKS}, or torchrun's)"
    add("--ranks", type=int, help=ranks_help)
    add("--expert-parallel", type=int, help="ranks that share the experts (default: all)")
    device_help = "auto (the default) uses the GPUs if there are any"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device_help)
    add("--save-every", type=int, default=100, help="steps between checkpoints (default: 100)")
    add("--exit-at-step", type=int, help="write a checkpoint and stop after this step")
    add("--print-every", type=int, default=10, help="steps between printed lines (default: 10)")
    # For the ranks that this command starts.
    add("--is-prepared", action="store_true", help=argparse.SUPPRESS)
    add_option_arguments(parser)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def main(args: argparse.Namespace) -> int:
    """Run `ncclep train` and return its exit status.

    Raises:
        EpError: a mistake that one process can detect; no rank is started then.
    """
    # torchrun sets all three for every process that it starts.
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if missing := [name for name in NEEDED if not _is_installed(name)]:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 2  # the first rank of this machine reports it
        raise InputError(
            f"not installed: {', '.join(missing)}; training needs the extra [train]: "
            "pip install 'megatron-ncclep[train]'"
        )
    job = Job.of(args, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    if under_torchrun:
        # Until the loop handles Ctrl-C, which ends it after a step.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        from megatron_ncclep.training.loop import run

        run(job)
        return 0
    if job.device == "cuda":
        from megatron_ncclep.ranks import topology  # imports torch, which takes seconds

        topology.require_gpus(job.ranks)
    with contextlib.ExitStack() as stack:
        with remarks_hidden():  # mistakes are reported before any rank starts
            lock = stack.enter_context(job.prepared())
        reports = stack.enter_context(tempfile.TemporaryDirectory(prefix="ncclep-train-"))
        status = _start_ranks(job, args.argv, Path(reports), lock)
        # What a rank has said stands far above torchrun's own report of the failure.
        if status and (report := first_report(Path(reports))):
            print(f"ncclep train: error: {report}", file=sys.stderr)
    return status


def _start_ranks(job: Job, argv: list[str], reports: Path, lock: int) -> int:
    """Start this command as ranks of torchrun, wait, and return their exit status.

    torchrun makes a folder of each rank in `reports`, for the rank's report of its error.  It has
    the file `lock`, too: what it starts may outlive this process.
    """
    # This process has already warned about variables that nothing reads.
    unknown = unknown_variables()
    environment = {name: text for name, text in os.environ.items() if name not in unknown}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.ranks)))
    if job.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # Without an address, torchrun retries the host's name for minutes where nothing resolves it.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(job.ranks), "--log-dir", str(reports)]
    command += ["-m", "megatron_ncclep", *argv, "--is-prepared"]
    print(f"starting {job.ranks} ranks, which takes a few seconds", flush=True)
    # torchrun and its ranks start with Ctrl-C blocked; only this process acts on it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with subprocess.Popen(command, env=environment, pass_fds=[lock]) as child:
        interrupt = _Interrupt(child)
        before = signal.signal(signal.SIGINT, interrupt)
        before_term = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            status = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            signal.signal(signal.SIGTERM, before_term)
    if interrupt.count == 0:
        return status if status >= 0 else 128 - status
    # Ranks that have saved end with 0; otherwise torchrun has reported the error.
    return status if status > 0 and interrupt.count == 1 else 128 + signal.SIGINT


class _Interrupt:
    """The handler of Ctrl-C: the first one makes ranks save and end, the second one kills them."""

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        self._launcher = launcher
        self.count = 0  # how often it came

    def __call__(self, number: int, frame: Any) -> None:
        import psutil  # type: ignore[import-untyped]

        self.count += 1
        if self.count == 1:
            print("stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher.pid)
            if self.count == 1:
                for rank in launcher.children():
                    # A terminal has already signalled the ranks, `kill -INT` has not.
                    rank.send_signal(signal.SIGINT)
            else:
                for process in [launcher, *launcher.children(recursive=True)]:
                    process.kill()
