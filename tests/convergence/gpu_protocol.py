"""The convergence protocol in bf16, for GPUs; docs/convergence.md says what it is for.

python tests/convergence/gpu_protocol.py run RESULTS        trains the arms, as many as time allows
python tests/convergence/gpu_protocol.py report RESULTS OUT   judges them: OUT/loss.png and table.md

The GPUs of this machine are divided into lanes of two, or one lane of one; every lane trains one
arm after the other.  What is done so far is always in RESULTS, and a report can be made of it at
any time.  `run` makes one too, in RESULTS.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from arm_log import read
from arms import SIZES
from train_arm import STARTS, Run, train_arm
from verdict import judge
from verdict_report import write_report

from megatron_ncclep.ranks.pool import RankError, RankPool

sys.path.append(str(Path(__file__).resolve().parents[1]))
from imports import import_megatron_on_cpu

ROOT = Path(__file__).resolve().parents[2]
RANKS_OF_A_LANE = 2
# TransformerEngine's attention gives the same bits in every run only then.  Multicast does not work
# on every machine with NVLink, and nothing here needs it.
ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_NVLS_ENABLE": "0"}
# Of an error's text, the end: it names what was raised.
MOST_CHARACTERS = 2000
LOG = "lane-{}.jsonl"
# In the folder for what need not be kept: a file for each training that a lane has begun.
BEGUN = "begun"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train the arms")
    run.add_argument("results", type=Path, help="folder for the logs, without any so far")
    run.add_argument("--size", choices=SIZES, default="gpu", help="default: gpu")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    run.add_argument(
        "--seconds", type=float, default=1e6, help="begin and go on with arms for so long"
    )
    run.add_argument(
        "--work", type=Path, help="folder for what need not be kept (default: RESULTS/work)"
    )
    # Of a process that is one lane: which, and when all must have ended, of `time.time()`.
    run.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    run.add_argument("--until", type=float, help=argparse.SUPPRESS)
    report = commands.add_parser("report", help="judge what was trained")
    report.add_argument("results", type=Path, help="what `run` was given")
    report.add_argument("out", type=Path, help="folder for the plot and the tables")
    report.add_argument("--size", choices=SIZES, default="gpu", help="default: gpu")
    return parser.parse_args(argv)


def lanes(device: str) -> list[str]:
    """The GPUs of each lane, as CUDA_VISIBLE_DEVICES has them; one lane without any on a CPU."""
    if device == "cpu":
        return [""]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    if not gpus:
        raise SystemExit("no GPU here: --device cpu --size small runs the protocol in small")
    size = min(RANKS_OF_A_LANE, len(gpus))
    return [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]


def run_lane(args: argparse.Namespace, index: int, until: float) -> None:
    """Train one arm after the other that no other lane has begun.

    Args:
        args: of `run`.
        index: of this lane.
        until: of the clock `time.time()`: when everything must have ended.
    """
    ranks = max(1, torch.cuda.device_count()) if args.device == "cuda" else RANKS_OF_A_LANE
    on_gpu = args.device == "cuda"
    prepare = None if on_gpu else import_megatron_on_cpu
    pool = RankPool(ranks, "nccl" if on_gpu else "gloo", prepare=prepare)
    claims = args.work / BEGUN
    claims.mkdir(parents=True, exist_ok=True)
    known: dict[str, float] = {}
    try:
        for arm, seed in SIZES[args.size].runs:
            log = args.results / LOG.format(index)
            run = Run(args.size, arm, seed, str(log), str(args.work), index)
            left = until - time.time()
            # One that is cut off tells nothing, and a shorter one may come next.
            of_others = SIZES[args.size].arm(arm).part * max(known.values(), default=0.0)
            too_long = left < known.get(arm, of_others)
            if too_long or not _claim(claims / f"{arm}-{seed}".replace(" ", "_")):
                continue
            begin = time.monotonic()
            try:
                pool.run(train_arm, run, timeout=max(1.0, left))
            except RankError as error:
                if time.time() < until:  # otherwise it was cut off, and the log shows where
                    run.write("failed", reason=str(error).strip()[-MOST_CHARACTERS:])
            known[arm] = time.monotonic() - begin
            print(f"lane {index}: {arm}, seed {seed}: {known[arm]:.0f} s", flush=True)
    finally:
        pool.close()


def _claim(path: Path) -> bool:
    """Make the file; False if another lane has."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Train in all lanes side by side, and report."""
    until = time.time() + args.seconds
    if any(args.results.glob(LOG.format("*"))):
        raise SystemExit(f"{args.results} holds logs already: give another folder")
    args.results.mkdir(parents=True, exist_ok=True)
    for left_behind in (args.work / BEGUN, args.work / STARTS):
        shutil.rmtree(left_behind, ignore_errors=True)
    divided = lanes(args.device)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    children = []
    for index, gpus in enumerate(divided):
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        command += ["--lane", str(index), "--work", str(args.work), "--until", str(until)]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        environment["CUDA_VISIBLE_DEVICES"] = gpus
        children.append(subprocess.Popen(command, env=environment))
    status = max(child.wait() for child in children)
    verdict = judge(SIZES[args.size], read(args.results))
    print(write_report(verdict, args.results))
    return status or (0 if verdict.holds else 1)


def main(argv: list[str]) -> int:
    """Run a command; the exit status is 0 if the protocol holds."""
    args = parse(argv)
    if args.command == "report":
        verdict = judge(SIZES[args.size], read(args.results))
        print(write_report(verdict, args.out))
        return 0 if verdict.holds else 1
    args.work = args.work or args.results / "work"
    if args.lane is None:
        return run(args, argv)
    run_lane(args, args.lane, args.until)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
