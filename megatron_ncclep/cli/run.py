"""Run an unmodified Megatron-LM script, with the dispatcher type `ncclep` available to it.

    ncclep run pretrain_gpt.py --moe-token-dispatcher-type ncclep ...
    torchrun --nproc-per-node 8 -m megatron_ncclep run pretrain_gpt.py ...
    srun --ntasks-per-node 8 python -m megatron_ncclep run --slurm pretrain_gpt.py ...

The script runs as `python SCRIPT ARGS...` would run it: as `__main__`, in this process, with its
own folder in front of the import path; its exit status and exceptions are the command's.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_ncclep import autoload
from megatron_ncclep.errors import InputError, IntegrationError
from megatron_ncclep.integration.import_hook import after_import
from megatron_ncclep.logs import CUDA_REMARKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `[--cpu] [--slurm] SCRIPT ARGS...`; everything after SCRIPT is passed to it."""
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run on a machine without a GPU; the script also needs --distributed-backend gloo, "
        "--transformer-impl local, --use-cpu-initialization and no fused kernels: "
        "configs/cluster/local-cpu.yaml lists all of these",
    )
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="each task of srun is a rank; MASTER_ADDR and MASTER_PORT have to be set",
    )
    parser.add_argument(
        "script", metavar="SCRIPT", help="path of the script, such as pretrain_gpt.py"
    )
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )


def main(args: argparse.Namespace) -> int:
    """Run the script; return 0 when it ends without SystemExit.

    Not collective itself: every rank of `torchrun` or task of `srun` calls it.

    Raises:
        InputError: SCRIPT is not a file, or `--slurm` is used outside srun.
        UnsupportedError: `--cpu` on a machine with a GPU.
        Exception: any error of the script.
    """
    script = Path(args.script)
    if not os.path.isfile(script):  # pathlib's is_file raises for a name that is too long
        what = "a folder" if os.path.isdir(script) else "not there"
        raise InputError(f"script {args.script!r} is {what}: give the path of a Python file")
    if args.slurm:
        _take_rank_from_slurm()
    _pose_as_python(script, args.arguments)
    autoload.hook_imports()
    after_import("megatron.core.datasets.utils", skip_missing_makefile, "a wheel's Megatron")
    if args.cpu:
        _move_to_cpu()
    runpy.run_path(args.script, run_name="__main__")
    return 0


def _take_rank_from_slurm() -> None:
    """Set torchrun's variables.  Without torchrun in between, Slurm's signals reach the ranks."""
    try:
        rank, size, local_rank = (
            os.environ["SLURM_PROCID"],
            os.environ["SLURM_STEP_NUM_TASKS"],
            os.environ["SLURM_LOCALID"],
        )
    except KeyError as missing:
        raise InputError(
            f"--slurm: {missing.args[0]} is not set: start ranks with srun, or leave --slurm out"
        ) from None
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local_rank)


def _pose_as_python(script: Path, arguments: Sequence[str]) -> None:
    """Set `sys.argv` and `sys.path[0]` as `python SCRIPT ARGS...` would."""
    sys.argv = [str(script), *arguments]
    if not getattr(sys.flags, "safe_path", False):  # `python -P` leaves sys.path[0] out; from 3.11
        sys.path[0] = str(script.resolve().parent)


def _move_to_cpu() -> None:
    # Only now: the Megatron that gets imported must be the one that the script will find.
    from megatron_ncclep import cpu

    # With a CUDA toolkit torch warns that there is no GPU, which is clear with --cpu.
    logging.getLogger(CUDA_REMARKS).setLevel(logging.ERROR)
    cpu.enable()
    # The wheel of 0.16 has no megatron.training; scripts that need only megatron.core still run.
    if importlib.util.find_spec("megatron.training") is not None:
        cpu.enable_training_scripts()


def skip_missing_makefile(datasets_utils: ModuleType) -> None:
    """Make `compile_helpers` do nothing if there is no Makefile and nothing to compile.

    megatron.training calls it at start-up.  It runs `make` in the installed package, but the wheels
    bring the compiled helpers and no Makefile, so every run would end there.  A checkout has a
    Makefile: there nothing changes.  If both are missing, the call raises IntegrationError.
    """
    folder = Path(str(datasets_utils.__file__)).parent
    if (folder / "Makefile").exists():
        return

    def compile_helpers() -> None:
        name = f"{datasets_utils.__package__}.helpers_cpp"
        if importlib.util.find_spec(name) is None:
            raise IntegrationError(
                f"{name} is not compiled, and {folder} has no Makefile to compile it with: install "
                "a megatron-core wheel that was built for this Python, or run from a checkout"
            )

    datasets_utils.compile_helpers = compile_helpers  # type: ignore[attr-defined]
