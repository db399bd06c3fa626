"""Measure what each way to move tokens costs: the engines, NVIDIA's library, Megatron-Core's own.

Every result is checked before it is timed.  The command starts its ranks itself; under torchrun it
is one of them.  Results go to --out: bench.json, bench.txt (what is printed) and bench.png.

Exit status: 0; 1 when a result is wrong, a subject fails, or one that --subjects names cannot run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from megatron_ncclep.benchmark import network_model, plot, table
from megatron_ncclep.benchmark import result as results
from megatron_ncclep.benchmark.job import HIGH_THROUGHPUT, LOW_LATENCY, MAX_RECV_ROWS, MODES, Job
from megatron_ncclep.benchmark.result import LISTS, Measured, ShapeResult, TrainingResult
from megatron_ncclep.benchmark.shapes import TrainingShape
from megatron_ncclep.cli import config_files
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import EpError, InputError

DEFAULT_CPU_RANKS = 2
# The whole of one shape may take this many times the deadline of one wait.
PATIENCE = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ncclep bench`."""
    parser.add_argument(
        "--config",
        metavar="NAME_OR_PATH",
        help=f"shapes: {', '.join(config_files.names(config_files.BENCHMARK))}, or a path that "
        "ends in .yaml (default: models; training where all subjects train; low_latency)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=HIGH_THROUGHPUT,
        help=f"{LOW_LATENCY}: low-latency mode, of the engines that have it and of NVIDIA's "
        "library, with few tokens: p50 and p99 of dispatch, combine and both, in replayed CUDA "
        "graphs (default: "
        f"{HIGH_THROUGHPUT}, for all else)",
    )
    parser.add_argument(
        "--subjects",
        help="what to measure, separated by commas, such as native@24,nccl_ep_library,alltoall "
        "(default: all but layers, experts and those that train; an unknown name lists them); "
        "NAME@N lets an engine's kernels use N SMs. Experts alone: experts:megatron, "
        "experts:grouped and experts:grouped:full_iteration. A whole MoELayer: layer:DISPATCHER, "
        "whole training steps: train:DISPATCHER, such as layer:alltoall_fused and "
        "train:ncclep:native, and after it, in this order, :grouped for this package's experts, "
        ":static for a fixed number of received rows, and :full_iteration (one CUDA graph of "
        "forward and backward; needs grouped, implies static) or, in training, :partial_graphs "
        "(Megatron-Core's of attention, router and preprocessing) and :optimizer_graph "
        "(Megatron-Core's of the optimizer's step)",
    )
    parser.add_argument(
        "--max-recv-rows",
        type=EpConfig.__dataclass_fields__["max_recv_rows"].metadata["parse"],
        help="received rows of layers and training with a fixed number of them, as "
        f"--ncclep-max-recv-rows takes it (default: {MAX_RECV_ROWS})",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help=f"processes to start (default: one for each GPU; {DEFAULT_CPU_RANKS} on a CPU; "
        "torchrun's)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="auto (the default) takes GPUs if any"
    )
    parser.add_argument(
        "--samples", type=int, help="timed rounds (default: 30 on GPUs, 3 on a CPU)"
    )
    parser.add_argument(
        "--warmup", type=int, help="untimed rounds (default: 5 on GPUs, 1 on a CPU)"
    )
    parser.add_argument("--out", default="runs/bench", help="where to (default: runs/bench)")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="small shapes on a CPU: the same as --config smoke --device cpu",
    )
    parser.add_argument(
        "--model-network",
        nargs="?",
        const="",
        metavar="NAME=VALUE,...",
        help="measure nothing: print how many bytes cross the network between 2 to 64 nodes, "
        "for engine 'hierarchical' and for a flat all-to-all, and how long that takes at least; "
        f"of {', '.join(f.name for f in dataclasses.fields(network_model.NetworkModel))} those "
        "that are not given have values of an example",
    )


def main(args: argparse.Namespace) -> int:
    """Run `ncclep bench` and return its exit status.

    Raises:
        EpError: something that one process can tell is wrong; nothing is measured then.
    """
    if args.model_network is not None:
        options = ("config", "subjects", "max_recv_rows", "ranks", "device", "samples", "warmup")
        given = {name: getattr(args, name) is not None for name in options}
        given |= {"mode": args.mode != HIGH_THROUGHPUT, "smoke": args.smoke}
        if ignored := [
            f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given
        ]:
            raise InputError(f"--model-network measures nothing: leave {', '.join(ignored)} out")
        print(network_model.table(network_model.parse(args.model_network)))
        return 0
    # torchrun sets both for every process that it starts.
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    job = make_job(args, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    try:  # now: what was measured must not be lost for want of a folder
        Path(job.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {job.out}: {error.strerror}: give a folder that can be written to"
        ) from error
    measured = _measure_as_rank(job) if under_torchrun else _measure_in_pool(job)
    return 0 if under_torchrun and os.environ["RANK"] != "0" else _finish(job, measured)


def make_job(args: argparse.Namespace, world_size: int | None) -> Job:
    """Turn the parsed arguments into a Job.  A job for the CPU hides the GPUs from this process.

    Args:
        world_size: ranks that torchrun has started; None outside torchrun.

    Raises:
        InputError: an argument is wrong, contradicts another, or would be ignored.
    """
    if args.smoke and args.config is not None:
        raise InputError(f"--smoke has shapes of its own: leave --config {args.config} out")
    if args.smoke and args.device not in (None, "cpu"):
        raise InputError(f"--smoke runs on the CPU: leave --device {args.device} out")
    if world_size is not None and args.ranks not in (None, world_size):
        raise InputError(f"--ranks {args.ranks}, but torchrun started {world_size}")
    if args.ranks is not None and args.ranks < 1:
        raise InputError(f"--ranks {args.ranks}: must be at least 1")
    device = "cpu" if args.smoke else args.device or "auto"
    if device == "cpu":
        # Before anything of this process or its children looks for GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from megatron_ncclep.ranks import place

    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise InputError("--device cuda: no GPU is visible; leave it out to measure on the CPU")
    ranks = args.ranks or world_size or (gpus if device == "cuda" else DEFAULT_CPU_RANKS)
    if device == "cuda" and world_size is None and ranks > gpus and not place.may_share_gpu():
        raise InputError(
            f"--ranks {ranks}: each needs a GPU of its own, and {gpus} are visible; "
            f"{place.HOW_TO_SHARE}"
        )
    return Job.make(args, ranks, device)


def _measure_in_pool(job: Job) -> list[Measured]:
    """Start the ranks and measure every shape.

    Ranks that die, in a library that aborts say, cost their shape only: the next one gets new ones.
    """
    from megatron_ncclep.benchmark.megatron_setup import import_on_cpu
    from megatron_ncclep.benchmark.run import run
    from megatron_ncclep.ranks.pool import RankError, RankPool

    if job.device == "cuda":
        pool = RankPool(job.ranks, "nccl")
    else:
        pool = RankPool(job.ranks, prepare=import_on_cpu if job.needs_megatron else None)
    measured: list[Measured] = []
    try:
        for shape in job.everything:
            if isinstance(shape, TrainingShape):
                pool.close()  # nothing of a model that is trained stays beside the next ones
            try:
                found = pool.run(run, job, shape, timeout=PATIENCE * job.timeout_s)[0]
            except RankError as error:
                print(error, file=sys.stderr)  # with the stack of every rank that raised
                kind = TrainingResult if isinstance(shape, TrainingShape) else ShapeResult
                found = kind.of(shape, error=_summary(error))
                found.judge(job.required)
            measured.append(found)
            # What has failed may leave anything behind, such as a capture that never ended.
            if found.error or any(subject.status == "failed" for subject in found.subjects):
                pool.close()
    finally:
        pool.close()
    return measured


def _summary(error: Exception) -> str:
    """What stands before the ranks' tracebacks, such as who died, and the last line of each."""
    before, *parts = re.split(r"^--- (?=rank \d+ ---$)", str(error), flags=re.MULTILINE)
    return "; ".join([
        *before.strip().splitlines(),
        *(f"{part.split(' ---', 1)[0]}: {part.strip().splitlines()[-1]}" for part in parts),
    ])  # fmt: skip


def _measure_as_rank(job: Job) -> list[Measured]:
    """Measure every shape as one rank of torchrun's; only rank 0 gets results."""
    import torch.distributed as dist

    from megatron_ncclep.benchmark.run import run
    from megatron_ncclep.ranks import place
    from megatron_ncclep.ranks.pool import RankContext

    if job.device == "cuda":
        place.use_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo", timeout=timedelta(seconds=2 * job.timeout_s)
    )
    try:
        assert dist.group.WORLD is not None  # just made
        context = RankContext(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, job.device)
        measured = [run(context, job, shape) for shape in job.everything]
    finally:
        dist.destroy_process_group()
    return [found for found in measured if found is not None]


def _finish(job: Job, measured: list[Measured]) -> int:
    """Write and print the results and return the exit status."""
    from megatron_ncclep.benchmark.machine import machine, versions

    result: dict[str, Any] = {
        "format": results.FORMAT,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(job.device, job.ranks),
        "versions": versions(job.device),
        # Where the results go says nothing about them.
        "options": {k: v for k, v in dataclasses.asdict(job).items() if k != "out"},
        **{name: [] for name in LISTS},
        "failures": [failure for shape in measured for failure in shape.failures],
    }
    for found in measured:
        of_shapes = "low_latency" if job.mode == LOW_LATENCY else "shapes"
        name = "trainings" if isinstance(found, TrainingResult) else of_shapes
        result[name].append(dataclasses.asdict(found))
    out = Path(job.out)
    results.save(result, out / "bench.json")
    text = table.render(result)
    (out / "bench.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}", flush=True)
    written = [out / "bench.json", out / "bench.txt"]
    try:
        plot.draw(result, out / "bench.png")
        written.append(out / "bench.png")
    except EpError as error:
        print(error)
    print(f"written: {', '.join(map(str, written))}")
    for failure in result["failures"]:
        print(f"ncclep bench: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0
