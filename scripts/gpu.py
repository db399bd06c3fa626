"""Run the tests that need GPUs, and write a summary: `make gpu`.

    python scripts/gpu.py [PART[:NUMBER] ...] [--out FOLDER] [--list]

Ranks share GPUs, and steps too: a step mostly waits for its hosts, so as many run at the same time
as the machine has cores for their ranks.  In the end, steps that measure a GPU's memory have one to
themselves.

Each step is one command with its own log; `summary.txt` lists every step, with date, machine and
versions, and can be committed unchanged.  A step that runs again in the same folder replaces its
line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from gpu_steps import PARTS, Step, chosen_steps, every_step

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = "summary.txt"
DUMP_S = 20  # for a stopped process to dump its stacks
MPS_QUIT_S = 15
SHORTEST_S = 15  # ranks need this long for their imports
MOST_ON_A_GPU = 6  # steps: they take turns on it, and ranks have deadlines


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: `counts` of tests, and why tests were left out.

    `passed` is None if the step was left out; `counts` then says why.
    """

    part: str
    step: str
    passed: bool | None
    seconds: int
    counts: str
    left_out: list[str]


def run_step(part: str, step: Step, out: Path, limit_s: int, gpus: str) -> Outcome:
    """Run a step on `gpus` (as in CUDA_VISIBLE_DEVICES), with its output in a log in `out`."""
    log = out / f"{part}-{PARTS[part].index(step)}.log"
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": gpus}
    if step.library:
        environment["NCCLEP_NCCL_EP_LIBRARY"] = step.library
    if problem := what_is_missing(step, environment):
        return Outcome(part, step.name, None, 0, problem, [])
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        log.open("w") as file,
        mps(step.mps, environment) as environment,
    ):
        report = Path(folder) / "report.xml"
        process = subprocess.Popen(
            step.command(report),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = -1
            process.send_signal(signal.SIGINT)  # pytest then reports what has failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(DUMP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        counts, left_out = read_report(report)
    lines = log.read_text(errors="replace").splitlines()
    left_out += [line.removeprefix("LEFT OUT ") for line in lines if line.startswith("LEFT OUT ")]
    if status:
        counts += f"; stopped after {limit_s} s" if status < 0 else f"; exit status {status}, {log}"
    seconds = round(time.monotonic() - start)
    return Outcome(part, step.name, status == 0, seconds, counts, left_out)


def what_is_missing(step: Step, environment: dict[str, str]) -> str:
    """Why none of the step's tests can run on this machine; empty if nothing is known."""
    if step.library:
        return library_problem(environment)
    from megatron_ncclep.libraries import extension

    if step.network and step.engine == "native" and not extension.load().build_info()["nccl"]:
        return (
            "the extension was built without NCCL's headers: build it again where NCCL_HOME has "
            "them in include/"
        )
    return ""


def library_problem(environment: dict[str, str]) -> str:
    """Why the libnccl_ep that `environment` names does not run with this NCCL; empty if it does."""
    program = (
        "from megatron_ncclep.libraries import nccl_ep as of; library = of.find_nccl_ep()\n"
        "print(of.nccl_problem(library, of.nccl_in_use()) or '' if library else of.NO_LIBRARY)"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return (found.stdout or found.stderr).strip()


def read_report(report: Path) -> tuple[str, list[str]]:
    """The numbers of tests that passed, failed and were skipped, and the reasons for skips."""
    if not report.is_file():
        return "no report", []
    suite = next(ElementTree.parse(report).iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - failed - skipped
    reasons = [
        f"{case.get('classname')}.{case.get('name')}: {mark.get('message')}"
        for case in suite.iter("testcase")
        for mark in case.iter("skipped")
    ]
    return f"{passed} passed, {failed} failed, {skipped} skipped", reasons


@contextmanager
def mps(is_wanted: bool, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Let processes that share a GPU run on it at the same time, with NVIDIA's MPS.

    Yields:
        the environment for such processes.
    """
    if not is_wanted:
        yield environment
        return
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        control, environment = "nvidia-cuda-mps-control", environment | places
        # In the foreground, so that it is a child that can be killed: after clients were killed it
        # may wait for them forever.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}  # control.log has it
        daemon = subprocess.Popen([control, "-f"], env=environment, start_new_session=True, **quiet)
        try:
            # The server numbers the GPUs that it was given from 0.
            visible = range(len(environment["CUDA_VISIBLE_DEVICES"].split(",")))
            yield environment | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))}
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [control], env=environment, input="quit -t 5\n", text=True, timeout=MPS_QUIT_S
                )
                daemon.wait(MPS_QUIT_S)
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def visible_gpus() -> list[str]:
    """The GPUs of this machine, in the form of CUDA_VISIBLE_DEVICES."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@cache
def described() -> str:
    """The machine and its software, as in `ncclep bench`."""
    import torch

    from megatron_ncclep.doctor.machine import machine, versions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = machine(device, 1) | versions(device)
    found.pop("ranks_per_gpu", None)  # differs from step to step
    return "\n".join(f"{name}: {value}" for name, value in found.items())


def write_summary(out: Path, outcome: Outcome) -> None:
    """Write `summary.txt` with one more step; steps run earlier in the same folder stay."""
    kept = out / "outcomes.json"
    earlier = [Outcome(**each) for each in json.loads(kept.read_text())] if kept.is_file() else []
    known = {(each.part, each.step): each for each in [*earlier, outcome]}
    kept.write_text(json.dumps([asdict(each) for each in known.values()]))
    lines = [datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), described(), ""]
    for part, step in every_step():
        found = known.get((part, step.name))
        if found is None:
            lines.append(f"{part:9} NOT RUN      {step.name}")
            continue
        if found.passed is None:
            lines.append(f"{part:9} NOT RUN      {step.name}: {found.counts}")
            continue
        result = "pass" if found.passed else "FAIL"
        lines.append(f"{part:9} {result} {found.seconds:4} s  {found.step}: {found.counts}")
        lines += [f"          NOT RUN      {reason}" for reason in found.left_out]
    (out / SUMMARY).write_text("\n".join(lines) + "\n")


def run_all(
    steps: list[tuple[str, Step]],
    gpus: list[str],
    cores: int,
    run: Callable[[str, Step, str], None],
) -> None:
    """Run steps, several at a time: first those that share GPUs, then those that are alone on one.

    The largest ones begin first: if they waited until enough cores are free, smaller ones would
    take these cores again and again.

    Args:
        steps: each with its part; of one size, in the order in which they should begin.
        gpus: what each step may get, as in CUDA_VISIBLE_DEVICES.
        cores: how many the steps that run may keep busy together, if they are several.
        run: runs a step on one of `gpus`.
    """
    changed = threading.Condition()
    waiting: list[int] = []  # cores of each
    running: list[int] = []

    def next_size() -> int | None:
        fit = [size for size in waiting if not running or sum(running) + size <= cores]
        return max(fit, default=None)

    def run_one(part: str, step: Step) -> None:
        with changed:
            waiting.append(step.cores)
            changed.wait_for(lambda: step.cores == next_size())
            waiting.remove(step.cores)
            running.append(step.cores)
            changed.notify_all()  # a smaller one may fit beside it
        gpu = free.get()
        try:
            run(part, step, gpu)
        finally:
            free.put(gpu)
            with changed:
                running.remove(step.cores)
                changed.notify_all()

    steps = sorted(steps, key=lambda each: -each[1].cores)
    begun = []
    for alone, most in ((False, MOST_ON_A_GPU), (True, 1)):
        free: SimpleQueue[str] = SimpleQueue()
        for gpu in gpus * most:
            free.put(gpu)
        with ThreadPoolExecutor(free.qsize()) as workers:
            begun += [workers.submit(run_one, *each) for each in steps if each[1].alone == alone]
    for each in begun:
        each.result()  # raises what `run` has raised


def main() -> int:
    """Run the steps that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"default: all of {[*PARTS]}; PART:NUMBER is one "
        "step, as --list numbers them; those with most ranks begin first",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="default: runs/gpu")
    parser.add_argument("--step-s", type=int, default=600, help="limit of one step (default: 600)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e6,
        help="limit of all steps; steps without time left are not run",
    )
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="that steps at the same time may keep "
        "busy; 1: one step after the other (default: all of the machine)",
    )  # fmt: skip
    parser.add_argument("--gpus-per-step", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    args = parser.parse_args()
    try:
        steps = chosen_steps(args.parts)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print("\n".join(f"{part}:{PARTS[part].index(step)}: {step.name}" for part, step in steps))
        return 0
    gpus, size = visible_gpus(), args.gpus_per_step
    if len(gpus) < size:
        parser.error(f"--gpus-per-step {size}: torch sees {len(gpus)} GPUs")
    groups = [
        ",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    described()  # what keeps a summary from being written is seen now, and not after an hour

    lock, until, failed = threading.Lock(), time.monotonic() + args.seconds, []

    def run(part: str, step: Step, chosen: str) -> None:
        left = int(until - time.monotonic())
        if left < SHORTEST_S:
            failed.append(step)
            return
        outcome = run_step(part, step, args.out, min(args.step_s, left), chosen)
        if outcome.passed is False:
            failed.append(step)
        with lock:  # after each step, so that the summary survives however the run ends
            print(f"{part}: {step.name}: {outcome.counts}, {outcome.seconds} s", flush=True)
            write_summary(args.out, outcome)

    run_all(steps, groups, args.cores, run)
    if (args.out / SUMMARY).is_file():
        print((args.out / SUMMARY).read_text())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
