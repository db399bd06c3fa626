"""Measure the cost of each way to move tokens: engines, NVIDIA's library, Megatron-Core's own.

Every result is checked before it is timed.  The command starts its ranks itself; under torchrun it
is one of them.  Results go to --out: bench.json, bench.txt (the printed text) and bench.png.

Exit status: 0; 1 if a result is wrong, a subject fails, or one that --subjects names cannot run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import Setting, Subject, deepep, plot, table
from megatron_ncclep.benchmark import ranks as links
from megatron_ncclep.benchmark import result as results
from megatron_ncclep.benchmark.engines import EngineSubject, LibrarySubject
from megatron_ncclep.benchmark.job import HIGH_THROUGHPUT, LOW_LATENCY, MAX_RECV_ROWS, Job, kind_of
from megatron_ncclep.benchmark.layer_model import import_on_cpu
from megatron_ncclep.benchmark.layers import DispatcherSubject, ExpertsSubject, LayerSubject
from megatron_ncclep.benchmark.low_latency import LibraryLowLatencySubject, LowLatencySubject
from megatron_ncclep.benchmark.ranks import Clock, DeviceMemory, Ranks
from megatron_ncclep.benchmark.result import Measured, ShapeResult, SubjectResult, TrainingResult
from megatron_ncclep.benchmark.shapes import Shape, TrainingShape, Workload, wire_rows
from megatron_ncclep.benchmark.training import TrainingRun
from megatron_ncclep.cli import config_files, network_model
from megatron_ncclep.config import EpConfig
from megatron_ncclep.doctor.machine import machine, versions
from megatron_ncclep.errors import EpError, InputError
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.ranks import place
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext, RankError, RankPool

DEFAULT_CPU_RANKS = 2
PATIENCE = 60  # the whole of one shape may take this many times the deadline of one wait
# Mode -> kind of a subject -> what makes it; layers also have an option.
SUBJECTS: dict[str, dict[str, Callable[[str, Setting, Workload], Subject]]] = {
    HIGH_THROUGHPUT: {
        "engine": EngineSubject, "library": LibrarySubject, "deepep": deepep.make,
        "megatron": DispatcherSubject, "experts": ExpertsSubject,
    },
    LOW_LATENCY: {"engine": LowLatencySubject, "library": LibraryLowLatencySubject},
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ncclep bench`."""
    add = parser.add_argument
    add(
        "--config", metavar="NAME_OR_PATH",
        help=f"shapes: {', '.join(config_files.names(config_files.BENCHMARK))}, or a path that "
        "ends in .yaml (default: models; training if all subjects train; low_latency)",
    )  # fmt: skip
    add(
        "--mode", choices=(HIGH_THROUGHPUT, LOW_LATENCY), default=HIGH_THROUGHPUT,
        help=f"{LOW_LATENCY}: low-latency mode, of the engines that have it and of NVIDIA's "
        "library, with few tokens: p50 and p99 of dispatch, combine and both, in replayed CUDA "
        f"graphs (default: {HIGH_THROUGHPUT}, for everything else)",
    )  # fmt: skip
    add(
        "--subjects",
        type=lambda text: text.split(","),
        action="extend",
        help="what to measure, separated by commas, such as native@24,nccl_ep_library,alltoall "
        "(default: all but layers, experts and those that train; an unknown name lists them); "
        "NAME@N: kernels of an engine or a library on N SMs; experts:megatron, experts:grouped: "
        "experts alone; "
        "layer:DISPATCHER: a whole MoELayer; train:DISPATCHER: whole training steps, such as "
        "train:ncclep:native, and after it, in this order, :grouped for this package's experts, "
        ":static for a fixed number of received rows, and :full_iteration (one CUDA graph of "
        "forward and backward; needs grouped, implies static) or, in training, :partial_graphs "
        "and :optimizer_graph (Megatron-Core's)",
    )
    add(
        "--max-recv-rows",
        type=EpConfig.__dataclass_fields__["max_recv_rows"].metadata["parse"],
        help="received rows of layers and trainings with a fixed number of them, in the form of "
        f"--ncclep-max-recv-rows (default: {MAX_RECV_ROWS})",
    )
    add("--ranks", type=int, help="processes to start (default: one per GPU, 2 on a CPU)")
    add("--device", choices=("auto", "cpu", "cuda"), help="auto (the default) uses GPUs if any")
    add("--samples", type=int, help="timed rounds (default: 30 on GPUs, 3 on a CPU)")
    add("--warmup", type=int, help="untimed rounds (default: 5 on GPUs, 1 on a CPU)")
    add("--out", default="runs/bench", help="folder for the results (default: runs/bench)")
    add("--overwrite", action="store_true", help="replace the results in --out")
    add("--smoke", action="store_true", help="small shapes: --config smoke --device cpu")
    add(
        "--model-network", nargs="?", const="", metavar="NAME=VALUE,...",
        help="measure nothing: print the bytes that cross the network between 2 to 64 nodes, "
        "for engine 'hierarchical' and for a flat all-to-all, and the least time that this takes; "
        f"{', '.join(network_model.names())} have example values unless given",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run `ncclep bench` and return its exit status.

    Raises:
        EpError: a mistake that one process can detect; nothing is measured then.
    """
    if args.model_network is not None:
        options = ("config", "subjects", "max_recv_rows", "ranks", "device", "samples", "warmup")
        given = [name for name in options if getattr(args, name) is not None]
        given += ["mode"] * (args.mode != HIGH_THROUGHPUT) + ["smoke"] * args.smoke
        if ignored := [f"--{name.replace('_', '-')}" for name in given]:
            raise InputError(f"--model-network measures nothing: leave {', '.join(ignored)} out")
        print(network_model.render(network_model.NetworkModel.parse(args.model_network)))
        return 0
    # torchrun sets both for every process that it starts.
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    job = make_job(args, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    if not args.overwrite and Path(job.out, "bench.json").exists():
        raise InputError(f"--out {job.out} holds results: give --overwrite, or another --out")
    try:  # now, so that results are not lost because there is no folder
        Path(job.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {job.out}: {error.strerror}: give another folder") from error
    return _write(job, _measure_as_rank(job) if under_torchrun else _measure_in_pool(job))


def make_job(args: argparse.Namespace, world_size: int | None) -> Job:
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
        place.require_gpus(ranks if world_size is None else 1)
    job = Job.make(args, ranks, device)
    if device == "cpu" and args.config is None and not args.smoke:
        raise InputError(f"{job.config} takes hours on a CPU: give --smoke, or name a --config")
    return job


def _measure_in_pool(job: Job) -> Iterator[Measured]:
    """Start the ranks and measure every shape; if ranks die, only their shape is lost."""
    if job.device == "cuda":
        pool = RankPool(job.ranks, "nccl")
    else:
        pool = RankPool(job.ranks, prepare=import_on_cpu if job.needs_megatron else None)
    todo, names, start = job.everything, ", ".join(job.subjects), time.monotonic()
    print(f"{len(todo)} shapes (the first shows how long they take): {names}", flush=True)
    try:
        for number, shape in enumerate(todo):
            if number:
                minutes = (time.monotonic() - start) / 60 * (len(todo) / number - 1)
                left = f"about {minutes:.0f} minutes" if minutes > 1 else "a minute at most"
                print(f"{number} of {len(todo)}: {left} to go", flush=True)
            if isinstance(shape, TrainingShape):
                pool.close()  # no earlier model stays in memory
            try:
                found = pool.run(run, job, shape, timeout=PATIENCE * job.timeout_s)[0]
            except RankError as error:
                print(error, file=sys.stderr)  # with the stack of every rank that raised
                kind = TrainingResult if isinstance(shape, TrainingShape) else ShapeResult
                found = kind.of(shape, error=_summary(error))
                found.judge(job.required)
            yield found
            # A failure may leave anything behind, such as a capture that never ended.
            if found.error or any(subject.status == "failed" for subject in found.subjects):
                pool.close()
    finally:
        pool.close()


def _summary(error: Exception) -> str:
    """The text before the ranks' tracebacks, such as which rank died, and the last line of each."""
    before, *parts = re.split(r"^--- (?=rank \d+ ---$)", str(error), flags=re.MULTILINE)
    last = [f"{part.split(' ---', 1)[0]}: {part.strip().splitlines()[-1]}" for part in parts]
    return "; ".join([*before.strip().splitlines(), *last])


def _measure_as_rank(job: Job) -> Iterator[Measured]:
    """Measure every shape as one of torchrun's ranks; only rank 0 gets results."""
    backend = "gloo"
    if job.device == "cuda":
        place.use_gpu(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * job.timeout_s))
    try:
        assert dist.group.WORLD is not None  # just made
        context = RankContext(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, job.device)
        for shape in job.everything:
            if found := run(context, job, shape):
                yield found
    finally:
        dist.destroy_process_group()


def _write(job: Job, measured: Iterable[Measured]) -> int:
    """Write the results, after each shape, and print them; returns the exit status.

    A run that is stopped leaves the results of the shapes before.
    """
    host, result, text, so_far = dict[str, Any](), dict[str, Any](), "", list[Measured]()
    as_json, as_text, as_plot = (Path(job.out, f"bench.{kind}") for kind in ("json", "txt", "png"))
    for found in measured:
        so_far.append(found)
        host = host or {"machine": machine(job.device, job.ranks), "versions": versions(job.device)}
        result = _result(job, host, so_far)
        results.save(result, as_json)
        text = table.render(result)
        as_text.write_text(text, encoding="utf-8")
    if not so_far:  # not rank 0
        return 0
    print(f"\n{text}", flush=True)
    written = f"written: {as_json}, {as_text}"
    try:
        plot.draw(result, as_plot)
        written += f", {as_plot}"
    except EpError as error:
        print(error)
    print(written)
    for failure in result["failures"]:
        print(f"ncclep bench: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


def _result(job: Job, host: dict[str, Any], measured: Sequence[Measured]) -> dict[str, Any]:
    """The contents of bench.json; `host`: the machine and versions."""
    result: dict[str, Any] = {
        "format": results.FORMAT,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **host,
        # The results do not depend on their folder.
        "options": {k: v for k, v in dataclasses.asdict(job).items() if k != "out"},
        **{name: [] for name in results.LISTS},
        "failures": [failure for shape in measured for failure in shape.failures],
    }
    of_shapes = "low_latency" if job.mode == LOW_LATENCY else "shapes"
    for found in measured:
        name = "trainings" if isinstance(found, TrainingResult) else of_shapes
        result[name].append(dataclasses.asdict(found))
    return result


def run(context: RankContext, job: Job, shape: Shape | TrainingShape) -> Measured | None:
    """Measure every subject of the job with one shape.  Collective; rank 0 gets the result."""
    ranks = Ranks(context, job.timeout_s, shape.name, shows=True)
    try:
        # Hides Megatron-Core's remarks about missing packages and similar ones.
        with remarks_hidden():
            if isinstance(shape, TrainingShape):
                result: Measured = TrainingRun(ranks, job, shape).run()
            else:
                # Graphs can be captured on this stream, unlike the default one.
                with torch.cuda.stream(torch.cuda.Stream()) if ranks.on_gpu else nullcontext():
                    result = _ShapeRun(ranks, job, shape).run()
            ranks.close()
    finally:
        ranks.stop()
    result.judge(job.required)
    return result if ranks.rank == 0 else None


def make_subject(
    name: str, setting: Setting, workload: Workload, mode: str = HIGH_THROUGHPUT,
    max_recv_rows: Any = None,
) -> Subject:  # fmt: skip
    """Prepare the subject called `name`, which does not train.  Collective.

    Raises:
        UnavailableError: it cannot be measured here; raised on every rank that knows the reason.
    """
    kind = kind_of(name)
    if kind == "layer":
        return LayerSubject(name, setting, workload, max_recv_rows)
    return SUBJECTS[mode][kind](name, setting, workload)


@dataclass
class _Entry:
    """A subject that is being measured, and its results so far."""

    result: SubjectResult
    subject: Any = None
    clock: Clock = dict


class _ShapeRun:
    """Prepares every subject for one shape, checks it, and times all of them interleaved."""

    def __init__(self, ranks: Ranks, job: Job, shape: Shape) -> None:
        self._ranks, self._job, self._shape = ranks, job, shape
        self._low_latency = job.mode == LOW_LATENCY

    def run(self) -> ShapeResult:
        ranks, shape = self._ranks, self._shape
        ranks.step("routing and payload")
        case = shape.case(ranks.num_ranks, ranks.setting.device)
        workload = Workload(case, ranks.rank, shape.ffn_hidden_size)
        result: ShapeResult = ShapeResult.of(shape)
        result.row_bytes, result.on_gpu = shape.row_bytes, ranks.on_gpu
        routes = (workload.tables, list(case.tokens))
        result.wire_bytes = wire_rows(*routes) * shape.row_bytes
        result.logical_bytes = wire_rows(*routes, with_own=True) * shape.row_bytes
        if not self._low_latency:
            result.set_products(workload)
            self._measure_ceiling(result)
        entries = [self._prepare(name, workload) for name in self._job.measured]
        result.subjects = [entry.result for entry in entries]
        for entry in entries:
            if (nodes := getattr(entry.subject, "nodes", None)) and nodes.count > 1:
                result.set_network(workload, nodes)
            result.max_tokens = getattr(entry.subject, "max_tokens", result.max_tokens)
        running = [entry for entry in entries if entry.result.status == "ok"]
        self._time(running)
        for entry in running:
            ranks.step(f"{entry.result.name}, checking again")
            self._check(entry, "after timing")
        for entry in running:
            ranks.step(f"{entry.result.name}, closing")
            entry.subject.close()
        return result

    def _measure_ceiling(self, result: ShapeResult) -> None:
        """Measure the links' bandwidth; if that is impossible, say why."""
        ranks, row_bytes = self._ranks, self._shape.row_bytes
        ranks.step("ceiling of the links")
        group, found = EpGroup.of(ranks.group), {}

        def copies() -> None:
            found.update(links.measure_ceiling(group, ranks.timer, row_bytes, self._job.timeout_s))

        status, reason = ranks.attempt(lambda: links.no_ceiling_reason(group, row_bytes))
        if status == "ok":
            status, reason = ranks.attempt(copies)
        result.set_ceiling(found if status == "ok" else {}, reason)

    def _prepare(self, name: str, workload: Workload) -> _Entry:
        """Prepare a subject, run every pass once and check the results."""
        ranks, job = self._ranks, self._job
        entry = _Entry(result := SubjectResult(name, kind=kind_of(name)))
        ranks.step(name)
        gc.collect()
        memory = DeviceMemory(ranks.on_gpu)

        def prepare() -> None:
            subject = make_subject(name, ranks.setting, workload, job.mode, job.max_recv_rows)
            entry.subject = subject
            for call in subject.passes.values():
                ranks.deadline()
                call()
            if ranks.on_gpu:
                torch.cuda.synchronize()
            result.memory = memory.growth(subject.shared_bytes)
            result.sms, result.window_bytes = subject.sms, subject.window_bytes
            entry.clock = subject.clock(ranks.timer)

        result.status, result.reason = ranks.attempt(prepare)
        if result.status == "ok":
            result.memory = ranks.largest(result.memory)
            ranks.deadline()
            self._check(entry, "before timing")
            if result.status == "wrong":
                entry.subject.close()
        if result.status != "ok":
            ranks.step(f"{name} is left out: {result.status}: {result.reason}")
        return entry

    def _check(self, entry: _Entry, when: str) -> None:
        status, reason = self._ranks.attempt(entry.subject.problem)
        if status != "ok":
            entry.result.fail(status, f"{when}: {reason}")

    def _time(self, entries: list[_Entry]) -> None:
        ranks, total = self._ranks, self._job.samples
        ranks.step(f"timing {len(entries)} subjects, {total} samples")
        clocks = {entry.result.name: entry.clock for entry in entries}
        rounds = []
        for times in links.measure(clocks, self._job.warmup, total):
            rounds.append(times)
            ranks.deadline()
        samples = links.slowest(ranks.gather(rounds))
        for entry in entries:
            entry.result.set_samples(samples[entry.result.name], self._low_latency)
