"""The `ncclep` command: one subcommand per module, each imported only when it is used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_ncclep.error_reporting import run_told
from megatron_ncclep.version import __version__

# name -> (module with `add_arguments(parser)` and `main(args) -> int`, one line of help)
COMMANDS = {
    "train": ("megatron_ncclep.training.command", "train a mixture-of-experts GPT on text"),
    "run": ("megatron_ncclep.cli.run", "run an unmodified Megatron-LM script with the dispatcher"),
    "render": (
        "megatron_ncclep.cli.render",
        "print the command that three configuration files make",
    ),
    "bench": ("megatron_ncclep.benchmark.command", "measure engines and other dispatchers"),
    "plot": (
        "megatron_ncclep.benchmark.plot",
        "draw a result of `ncclep bench`, or metrics of `ncclep train`",
    ),
    "doctor": ("megatron_ncclep.doctor", "say what decides how the dispatcher runs here"),
    "env": ("megatron_ncclep.envs", "list the environment variables and their values"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `ncclep` command with `argv` (default: the process's) and return its exit status.

    A user's mistake (EpError) is printed as one line, with exit status 2.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="ncclep", description="Train with the Megatron-Core token dispatcher ncclep."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        command = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if argv[:1] == [name]:
            module = import_module(module_name)
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.main, argv=argv)
    args = parser.parse_args(argv)
    return run_told(f"ncclep {args.command}", lambda: args.run(args))
