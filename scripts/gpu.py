"""Run the tests that need GPUs, and write a summary: `make gpu`.

    python scripts/gpu.py [PART ...] [--out FOLDER] [--list]

A part takes at most ten minutes on one GPU, which the ranks share.  With several GPUs, equally many
steps run at the same time, each on its own GPU; `--gpus-per-step 2` gives each step two, and
`--at-once 3` runs three steps on each GPU: a step mostly waits for its hosts, if there are cores
for them.  55 ranks on 64 cores took 1.7 times as long as 12; a rank over the test network keeps
three cores busy, so run the part `network` by itself.  Each step is one command with its own log;
`summary.txt` lists every step, with date, machine and versions, and can be committed unchanged.  A
step that runs again in the same folder replaces its line.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = "summary.txt"
DUMP_S = 20  # for a stopped process to dump its stacks
MPS_QUIT_S = 15
SHORTEST_S = 15  # ranks need this long for their imports
RANDOM = "tests/contract/test_random.py --iterations"


@dataclass(frozen=True)
class Step:
    """One run of pytest.

    Attributes:
        engine: the engine under test.
        ranks: sizes of its pools; contract cases run with each of them.
        tests: paths, and more arguments.
        hosts: the number of hosts that the ranks appear to be on.
        library: the package whose libnccl_ep is used (NCCLEP_NCCL_EP_LIBRARY); empty: any.
        network: what kernels' puts between hosts go over (pytest --network); empty: nothing.
        mps: ranks that share a GPU run at the same time.  Not where ranks are killed: under MPS
            that harms the others.
        alone: no other step uses the GPU meanwhile, because the tests measure its memory.
    """

    engine: str
    ranks: tuple[int, ...]
    tests: str
    hosts: int = 1
    library: str = ""
    network: str = ""
    mps: bool = True
    alone: bool = False

    @property
    def name(self) -> str:
        """Unique among all steps."""
        grid = "+".join(map(str, self.ranks))
        if self.hosts > 1:
            grid = f"{self.hosts}x{self.ranks[-1] // self.hosts}"
        engine = f"{self.engine} of {self.library}" if self.library else self.engine
        return f"{engine} {grid}: {self.tests}"

    def command(self, report: Path) -> list[str]:
        """What runs it."""
        options = ["--backend", "nccl", "--engine", self.engine, "--hosts", str(self.hosts)]
        for number in self.ranks:
            options += ["--ranks", str(number)]
        options += ["--network", self.network] if self.network else []
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return [*run, f"--junitxml={report}", *self.tests.split(), *options]


GRAPHS = "tests/gpu/test_graphs.py tests/gpu/test_gpu_static_mode.py"
ENGINE = f"{GRAPHS} tests/gpu/test_gpu_stream_order.py tests/gpu/test_gpu_streams.py " + (
    "tests/gpu/test_gpu_route_plan.py tests/gpu/test_gpu_metrics.py"
)
LOW_LATENCY = "tests/gpu/test_gpu_low_latency.py"
# Over hosts no rank of `native` shares memory with all others.
FAULTS = "tests/faults/test_host.py tests/faults/test_device.py --deselect " + (
    "tests/faults/test_host.py::test_a_rank_that_dies_while_memory_is_shared_leaves_none"
)
STEPS = "tests/contract/test_steps.py tests/contract/test_autograd.py"
# What differs with the grid of hosts and ranks; 2 x 2 runs all of the contract.
GRID = " ".join(
    f"tests/contract/test_{name}.py"
    for name in ("steps", "autograd", "batches_in_turn", "low_latency", "overflow")
)
PARTS: dict[str, list[Step]] = {
    "contract": [
        Step("native", (8,), "tests/contract"),
        Step("native", (4,), "tests/contract"),
        Step("native", (2,), "tests/contract"),
        Step("hierarchical", (4,), "tests/contract", hosts=2),
        Step("hierarchical", (8,), "tests/contract", hosts=2),
        Step("hierarchical", (8,), "tests/contract", hosts=4),
        Step("reference", (4,), "tests/contract"),
        Step("nccl_ep", (2,), "tests/contract", mps=False),
        Step("nccl_ep", (2,), STEPS, mps=False, library="transformer-engine"),
    ],
    "random": [
        *(Step("native", (ranks,), f"{RANDOM} 250") for ranks in (8, 4, 2)),
        Step("hierarchical", (4,), f"{RANDOM} 200", hosts=2),
        Step("hierarchical", (8,), f"{RANDOM} 100", hosts=2),
        Step("hierarchical", (8,), f"{RANDOM} 100", hosts=4),
    ],
    "engine": [
        Step("native", (4,), f"{ENGINE} {LOW_LATENCY}"),
        Step("native", (8,), f"{GRAPHS} {LOW_LATENCY}"),
        Step("hierarchical", (4,), f"{GRAPHS} tests/gpu/test_gpu_stream_order.py", hosts=2),
        Step("hierarchical", (8,), GRAPHS, hosts=2),
        Step("hierarchical", (8,), GRAPHS, hosts=4),
        Step("hierarchical", (2,), "tests/gpu/test_gpu_nodes.py", hosts=2),
        Step("native", (2,), "tests/gpu/test_gpu_rebuilding.py", alone=True),
        Step("native", (2,), "tests/gpu/test_gpu_released_memory.py", alone=True),
        Step("native", (2,), "tests/gpu/test_large_offsets.py", alone=True),
        Step("native", (2,), "tests/gpu/test_gpu_c_example.py"),
    ],
    "network": [
        Step("native", (2,), "tests/gpu/test_gpu_network.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_network.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_network.py", hosts=4, network="loop"),
        Step("hierarchical", (4,), "tests/gpu/test_gpu_links.py", hosts=2, network="loop-all"),
        Step("native", (4,), "tests/contract", hosts=2, network="loop"),
        Step("native", (8,), GRID, hosts=2, network="loop"),
        Step("native", (8,), GRID, hosts=8, network="loop"),
        Step("native", (4,), GRID, hosts=4, network="loop"),
        Step("native", (2,), GRID, hosts=2, network="loop"),
        *(
            Step("native", (4,), f"{RANDOM} 100 --seed {seed}", hosts=2, network="loop")
            for seed in range(2)  # in one step they would take longer than a step may
        ),
        Step("native", (8,), f"{RANDOM} 50", hosts=2, network="loop"),
        Step("native", (4,), f"{ENGINE} {LOW_LATENCY}", hosts=2, network="loop"),
        Step("native", (8,), f"{GRAPHS} {LOW_LATENCY}", hosts=4, network="loop"),
        Step("native", (4,), FAULTS, hosts=2, network="loop", mps=False),
        Step("native", (2,), "tests/gpu/test_gpu_inference.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_gpt.py", hosts=2, network="loop"),
        Step("native", (4,), "tests/gpu/test_gpu_reruns.py -k auto", hosts=2, network="loop"),
    ],
    "layers": [
        Step("native", (2,), "tests/gpu/test_gpu_experts.py tests/gpu/test_gpu_grouped_experts.py"),
        Step("native", (1, 2), "tests/gpu/test_gpu_batch_invariance.py"),
        Step("native", (1,), "tests/gpu/test_gpu_quack.py tests/gpu/test_gpu_gradient_fusion.py"),
        Step(
            "native", (2,), "tests/gpu/test_gpu_changed_experts.py tests/gpu/test_gpu_adapters.py"
        ),
        Step("native", (4,), "tests/gpu/test_gpu_moe_layer.py"),
        Step("native", (4,), "tests/gpu/test_gpu_shapes.py"),
        Step("native", (4,), "tests/gpu/test_gpu_packed_batches.py"),
        Step(
            "native", (2,), "tests/gpu/test_gpu_shared_experts.py tests/gpu/test_gpu_inference.py"
        ),
    ],
    "train": [  # the longest first
        Step("native", (1,), "tests/gpu/test_gpu_bridge.py -rP"),
        Step("native", (2,), "tests/gpu/test_megatron_graphs.py"),
        Step("native", (4,), "tests/gpu/test_gpu_gpt.py"),
        Step("native", (4,), "tests/gpu/test_gpu_train_command.py"),
        Step("native", (2,), "tests/gpu/test_gpu_doc_commands.py"),
        Step("native", (8,), "tests/gpu/test_gpu_gpt.py"),
        Step("hierarchical", (4,), "tests/gpu/test_gpu_gpt.py", hosts=2),
        Step("native", (2,), "tests/gpu/test_gpu_overlapped_schedule.py"),
        Step("native", (2,), "tests/gpu/test_gpu_memory.py", alone=True),
        Step("native", (4,), "tests/gpu/test_gpu_reruns.py"),
        # There an expert is alone on its rank, and 2.5 times a balanced load is another limit.
        Step("native", (8,), "tests/gpu/test_gpu_reruns.py -k auto"),
        Step("native", (2,), "tests/gpu/test_fp8_training.py"),
    ],
    "faults": [
        Step("native", (4,), "tests/faults --ignore tests/faults/test_growth.py", mps=False),
        Step("native", (4,), "tests/faults/test_growth.py", mps=False, alone=True),
        Step("native", (4,), "tests/gpu/test_failures.py", mps=False),
        Step("native", (8,), "tests/faults/test_host.py", mps=False),
        Step("hierarchical", (4,), "tests/faults/test_host.py", hosts=2, mps=False),
    ],
}


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


def every_step() -> list[tuple[str, Step]]:
    """All steps, each with the name of its part."""
    return [(part, step) for part, steps in PARTS.items() for step in steps]


def main() -> int:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"in this order; default: all of {[*PARTS]}"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="default: runs/gpu")
    parser.add_argument("--step-s", type=int, default=300, help="limit of one step (default: 300)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e6,
        help="limit of all steps; steps without time left are not run",
    )
    parser.add_argument("--steps", help="only steps whose name contains this")
    parser.add_argument("--gpus-per-step", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="steps on a GPU (1)")
    parser.add_argument("--list", action="store_true", help="print parts and steps, and run none")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {sorted(unknown)}; there are {[*PARTS]}")
    steps = [
        (part, step)
        for part in args.parts or PARTS
        for step in PARTS[part]
        if (args.steps or "") in step.name
    ]
    if not steps:
        parser.error(f"no step's name contains {args.steps!r}")
    if args.list:
        print("\n".join(f"{part}: {step.name}" for part, step in steps))
        return 0
    gpus, size = visible_gpus(), args.gpus_per_step
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: must be at least 1")
    if len(gpus) < size:
        parser.error(f"--gpus-per-step {size}: torch sees {len(gpus)} GPUs")
    groups = [
        ",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    described()  # what keeps a summary from being written is seen now, and not after an hour

    lock, until = threading.Lock(), time.monotonic() + args.seconds

    def run(free: queue.Queue[str], part: str, step: Step) -> bool:
        chosen = free.get()
        try:
            left = int(until - time.monotonic())
            if left < SHORTEST_S:
                return False
            outcome = run_step(part, step, args.out, min(args.step_s, left), chosen)
        finally:
            free.put(chosen)
        with lock:  # after each step, so that the summary survives however the run ends
            print(f"{part}: {step.name}: {outcome.counts}, {outcome.seconds} s", flush=True)
            write_summary(args.out, outcome)
        return outcome.passed is not False

    passed: list[bool] = []
    for alone, at_once in ((False, args.at_once), (True, 1)):
        free: queue.Queue[str] = queue.Queue()  # each GPU as often as steps may share it
        for group in groups * at_once:
            free.put(group)
        with ThreadPoolExecutor(free.qsize()) as workers:
            begun = [workers.submit(run, free, *each) for each in steps if each[1].alone is alone]
        passed += [each.result() for each in begun]
    if (args.out / SUMMARY).is_file():
        print((args.out / SUMMARY).read_text())
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
