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

from benchmarks import HIGH_THROUGHPUT, network_model, plot, result
from benchmarks.command import add_arguments, measure
from megatron_ncclep.cli import Parser
from megatron_ncclep.error_reporting import run_reporting
from megatron_ncclep.errors import EpError, InputError

NAME = "benchmarks"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
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
        options = ("config", "subjects", "max_recv_rows", "ranks", "device", "samples", "warmup")
        given = [name for name in options if getattr(args, name) is not None]
        given += ["mode"] * (args.mode != HIGH_THROUGHPUT) + ["smoke"] * args.smoke
        if ignored := [f"--{name.replace('_', '-')}" for name in given]:
            raise InputError(f"--model-network measures nothing: leave {', '.join(ignored)} out")
        print(network_model.render(network_model.NetworkModel.parse(args.model_network)))
        return 0
    status = measure(args)
    if os.environ.get("RANK", "0") == "0":
        drawn = Path(args.out, "bench.png")
        try:
            plot.draw(result.load(Path(args.out, "bench.json")), drawn)
            print(f"drawn: {drawn}")
        except EpError as error:
            print(error)
    return status


if __name__ == "__main__":
    sys.exit(main())
