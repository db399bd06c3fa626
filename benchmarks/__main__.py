"""Measure engines, NVIDIA's library, DeepEP, Megatron-Core's dispatchers, layers and trainings.

Every result is checked before it is timed.  The command starts its ranks itself; under torchrun it
is one of them.  Results go to --out: bench.json, bench.txt (the printed text) and bench.png.

Exit status: 0; 1 if a result is wrong, a subject fails, or one that --subjects names cannot run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import network_model, plot, result, shapes, table, waterfall
from benchmarks.catalogue import MAX_RECV_ROWS
from benchmarks.job import Job
from megatron_ncclep.benchmark import HIGH_THROUGHPUT
from megatron_ncclep.benchmark.command import add_common_arguments, measure
from megatron_ncclep.cli import Parser
from megatron_ncclep.config import EpConfig
from megatron_ncclep.error_reporting import run_reporting
from megatron_ncclep.errors import EpError, InputError

NAME = "benchmarks"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(
        parser,
        f"{', '.join(shapes.names())}, or a path that ends in .yaml (default: models; training if "
        "all subjects train; low_latency)",
        "separated by commas, such as native@24,nccl_ep_library,alltoall (default: all but layers, "
        "experts and those that train; an unknown name lists them); NAME@N: kernels of an engine "
        "or a library on N SMs; experts:megatron, experts:grouped, either with _fp8: experts "
        "alone; "
        "layer:DISPATCHER: a whole MoELayer; train:DISPATCHER: whole training steps, such as "
        "train:ncclep:native, and after it, in this order, :grouped for this package's experts, "
        ":frozen, :lora16 or :lora32 for layers whose experts are frozen, without or with "
        "Megatron-Bridge's adapters, :static for a fixed number of received rows, and "
        ":full_iteration (one CUDA graph of forward and backward; needs grouped, implies static) "
        "or, in training, Megatron-Core's :fp8 (blockwise), :router_fusion, :partial_graphs and "
        ":optimizer_graph",
    )
    parser.add_argument(
        "--shape", action="append", metavar="NAME",
        help="of the file's shapes and trainings only this one; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--trace", action="store_true",
        help="also draw where a training step's time goes: OUT/traces/, see waterfall.py",
    )  # fmt: skip
    parser.add_argument(
        "--max-recv-rows",
        type=EpConfig.__dataclass_fields__["max_recv_rows"].metadata["kind"].parse,
        help="received rows of layers and trainings with a fixed number of them, in the form of "
        f"--ncclep-max-recv-rows (default: {MAX_RECV_ROWS})",
    )
    parser.add_argument(
        "--model-network", nargs="?", const="", metavar="NAME=VALUE,...",
        help="measure nothing: print the bytes that cross the network between 2 to 64 nodes, "
        "for engine 'hierarchical' and for a flat all-to-all, and the least time that this takes; "
        f"{', '.join(network_model.names())} have example values unless given",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's) and return its exit status."""
    args = make_parser().parse_args(argv)
    return run_reporting(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure, and draw the result.

    Raises:
        EpError: a mistake that one process can detect; nothing is measured then.
    """
    if args.model_network is not None:
        options = ("config", "subjects", "shape", "max_recv_rows", "ranks", "device", "samples",
                   "warmup")  # fmt: skip
        given = [name for name in options if getattr(args, name) is not None]
        given += ["mode"] * (args.mode != HIGH_THROUGHPUT) + ["smoke"] * args.smoke
        given += ["trace"] * args.trace
        if ignored := [f"--{name.replace('_', '-')}" for name in given]:
            raise InputError(f"--model-network measures nothing: leave {', '.join(ignored)} out")
        print(network_model.render(network_model.NetworkModel.parse(args.model_network)))
        return 0
    status = measure(args, Job, NAME, table.render)
    if os.environ.get("RANK", "0") == "0":
        drawn = Path(args.out, "bench.png")
        try:
            plot.draw(result.load(Path(args.out, "bench.json")), drawn)
            print(f"drawn: {drawn}")
            for folder in sorted(Path(args.out, "traces").glob("*")) if args.trace else ():
                print(f"drawn: {waterfall.draw_folder(folder)}")
        except EpError as error:
            print(error)
    return status


if __name__ == "__main__":
    sys.exit(main())
