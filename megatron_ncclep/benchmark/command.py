"""Measure what this package's engines cost on this machine: plan, dispatch, combine and backward.

Every result is checked before it is timed.  The command starts its ranks itself; under torchrun it
is one of them.  Results go to --out: bench.json and bench.txt (the printed text).  Other libraries,
Megatron-Core's dispatchers, layers and trainings: `python -m benchmarks`, in a checkout.

Exit status: 0; 1 if a result is wrong, a subject fails, or one that --subjects names cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import HIGH_THROUGHPUT, LOW_LATENCY, table
from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.ranks import Ranks
from megatron_ncclep.benchmark.result import FORMAT, Measured
from megatron_ncclep.cli import config_files, folder_lock
from megatron_ncclep.doctor.machine import machine, versions
from megatron_ncclep.errors import InputError
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.launch import LocalRanks, RankContext, RankError, join

DEFAULT_CPU_RANKS = 2
PATIENCE = 60  # the whole of one shape may take this many times the deadline of one wait
HINT = "; --model-network and --max-recv-rows are options of `python -m benchmarks`, in a checkout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ncclep bench`."""
    add_common_arguments(
        parser,
        f"{', '.join(config_files.names(config_files.BENCHMARK))}, or a path that ends in .yaml "
        "(default: models; low_latency)",
        "engines, separated by commas, such as native@24,reference (default: all of them; an "
        "unknown name lists them); NAME@N: kernels on N SMs",
    )
    parser.set_defaults(hint=HINT)


def add_common_arguments(parser: argparse.ArgumentParser, configs: str, subjects: str) -> None:
    """Add the arguments of any benchmark; the texts say which shapes and subjects there are."""
    add = parser.add_argument
    add("--config", metavar="NAME_OR_PATH", help=f"shapes: {configs}")
    add(
        "--mode", choices=(HIGH_THROUGHPUT, LOW_LATENCY), default=HIGH_THROUGHPUT,
        help=f"{LOW_LATENCY}: low-latency mode, with few tokens: p50 and p99 of dispatch, combine "
        f"and both, in replayed CUDA graphs (default: {HIGH_THROUGHPUT}, for everything else)",
    )  # fmt: skip
    add(
        "--subjects",
        type=lambda text: text.split(","),
        action="extend",
        help=f"what to measure: {subjects}",
    )
    add("--ranks", type=int, help="processes to start (default: one per GPU, 2 on a CPU)")
    add("--device", choices=("auto", "cpu", "cuda"), help="auto (the default) uses GPUs if any")
    add("--samples", type=int, help="timed rounds (default: 30 on GPUs, 3 on a CPU)")
    add("--warmup", type=int, help="untimed rounds (default: 5 on GPUs, 1 on a CPU)")
    add("--out", default="runs/bench", help="folder for the results (default: runs/bench)")
    add("--overwrite", action="store_true", help="replace the results in --out")
    add("--smoke", action="store_true", help="small shapes: --config smoke --device cpu")


def main(args: argparse.Namespace) -> int:
    """Run `ncclep bench` and return its exit status.

    Raises:
        EpError: a mistake that one process can detect; nothing is measured then.
    """
    return measure(args, Job, "ncclep bench", table.render)


def measure(
    args: argparse.Namespace, kind: type[Job], command: str, render: Callable[[Any], str]
) -> int:
    """Run a benchmark and return its exit status; see `main`.

    Args:
        args: of `add_common_arguments`, and what `kind` takes besides.
        kind: what can be measured.
        command: its name in messages.
        render: turns the contents of bench.json into text.
    """
    # torchrun sets both for every process that it starts.
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    job = make_job(args, kind, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    # Now, so that results are not lost because the folder cannot be written.
    writes = not under_torchrun or os.environ["RANK"] == "0"
    with folder_lock.held(Path(job.out)) if writes else contextlib.nullcontext():
        if not args.overwrite and Path(job.out, "bench.json").exists():
            raise InputError(f"--out {job.out} holds results: give --overwrite, or another --out")
        found = _measure_as_rank(job) if under_torchrun else _measure_in_ranks(job)
        return _write(job, found, command, render)


def make_job(args: argparse.Namespace, kind: type[Job], world_size: int | None) -> Any:
    """Turn the parsed arguments into a Job.  A job for the CPU hides the GPUs from this process.

    `world_size` is the number of ranks that torchrun has started; None outside torchrun.

    Raises:
        InputError: an argument is wrong, contradicts another, or would be ignored.
    """
    if args.smoke and args.config is not None:
        raise InputError(f"--smoke has its own shapes: leave --config {args.config} out")
    if args.smoke and args.device not in (None, "cpu"):
        raise InputError(f"--smoke runs on the CPU: leave --device {args.device} out")
    if world_size is not None and args.ranks not in (None, world_size):
        raise InputError(f"--ranks {args.ranks}, but torchrun started {world_size}")
    if args.ranks is not None and args.ranks < 1:
        raise InputError(f"--ranks {args.ranks}: must be at least 1")
    device = "cpu" if args.smoke else args.device or "auto"
    if device == "cpu":
        # Before this process or its children look for GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    ranks = args.ranks or world_size or (gpus if device == "cuda" else DEFAULT_CPU_RANKS)
    if device == "cuda":
        topology.require_gpus(ranks if world_size is None else 1)
    job = kind.make(args, ranks, device)
    if device == "cpu" and args.config is None and not args.smoke:
        raise InputError(f"{job.config} takes hours on a CPU: give --smoke, or name a --config")
    return job


def _measure_in_ranks(job: Job) -> Iterator[Measured]:
    """Start the ranks and measure everything; if ranks die, only their shape is lost."""
    total = sum(map(len, job.batches()))
    names, start = ", ".join(job.subjects), time.monotonic()
    print(f"{total} shapes (the first shows how long they take): {names}", flush=True)
    number = 0
    for batch in job.batches():
        left = batch
        while left:  # with new processes
            for found in _measure_batch(job, left):
                yield found
                number, left = number + 1, left[1:]
                if number < total:
                    minutes = (time.monotonic() - start) / 60 * (total / number - 1)
                    to_go = f"about {minutes:.0f} minutes" if minutes > 1 else "a minute at most"
                    print(f"{number} of {total}: {to_go} to go", flush=True)


def _measure_batch(job: Job, batch: list[Any]) -> Iterator[Measured]:
    """Measure shapes in the same processes, until something fails in one."""
    backend = "nccl" if job.device == "cuda" else "gloo"
    with LocalRanks(job.ranks, backend, run_all, job, batch, prepare=job.prepare) as ranks:
        for shape in batch:
            try:
                found = ranks.receive(PATIENCE * job.timeout_s)[0]
            except RankError as error:
                print(error, file=sys.stderr)  # with the stack of every rank that raised
                found = job.result_of(shape, _summary(error))
                found.judge(job.required)
            yield found
            # A failure may leave anything behind, such as a capture that never ended.
            if found.error or any(subject.status == "failed" for subject in found.subjects):
                return


def _summary(error: Exception) -> str:
    """The text before the ranks' tracebacks, such as which rank died, and the last line of each."""
    before, *parts = re.split(r"^--- (?=rank \d+ ---$)", str(error), flags=re.MULTILINE)
    last = [f"{part.split(' ---', 1)[0]}: {part.strip().splitlines()[-1]}" for part in parts]
    return "; ".join([*before.strip().splitlines(), *last])


def _measure_as_rank(job: Job) -> Iterator[Measured]:
    """Measure every shape as one of torchrun's ranks; only rank 0 gets results."""
    context = join("nccl" if job.device == "cuda" else "gloo")
    try:
        for shape in chain.from_iterable(job.batches()):
            if found := run(context, job, shape):
                yield found
    finally:
        dist.destroy_process_group()


def _write(
    job: Job, measured: Iterable[Measured], command: str, render: Callable[[Any], str]
) -> int:
    """Write the results, after each shape, and print them; returns the exit status.

    A run that is stopped leaves the results of the shapes before.
    """
    result, text = dict[str, Any](), ""
    as_json, as_text = (Path(job.out, f"bench.{kind}") for kind in ("json", "txt"))
    for found in measured:
        result = result or _empty_result(job)
        result[job.list_of(found)].append(dataclasses.asdict(found))
        result["failures"] += found.failures
        as_json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        text = render(result)
        as_text.write_text(text, encoding="utf-8")
    if not result:  # not rank 0
        return 0
    print(f"\n{text}", flush=True)
    print(f"written: {as_json}, {as_text}")
    for failure in result["failures"]:
        print(f"{command}: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


def _empty_result(job: Job) -> dict[str, Any]:
    """The contents of bench.json before anything was measured."""
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(job.device, job.ranks),
        "versions": versions(job.device),
        # The results do not depend on their folder.
        "options": {k: v for k, v in dataclasses.asdict(job).items() if k != "out"},
        **{name: [] for name in job.lists()},
        "failures": [],
    }


def run_all(
    context: RankContext, send: Callable[[Measured | None], None], job: Job, batch: list[Any]
) -> None:
    """Measure a batch as one of the ranks, and send each result.  Collective."""
    for shape in batch:
        send(run(context, job, shape))


def run(context: RankContext, job: Job, shape: Any) -> Measured | None:
    """Measure every subject of the job with one shape.  Collective; rank 0 gets the result."""
    ranks = Ranks(context, job.timeout_s, shape.name, shows=True)
    try:
        # Hides Megatron-Core's remarks about missing packages and similar ones.
        with remarks_hidden():
            result = job.measure(ranks, shape)
            ranks.close()
    finally:
        ranks.stop()
    result.judge(job.required)
    return result if ranks.rank == 0 else None
