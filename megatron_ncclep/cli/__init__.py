"""The `ncclep` command: one subcommand per module, each imported only when it is used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from megatron_ncclep.config import OPTION_FLAG, VARIABLES, EpConfig, unknown_variables
from megatron_ncclep.error_reporting import run_reporting
from megatron_ncclep.version import __version__

# name -> (module with `add_arguments(parser)` and `main(args) -> int`, one line of help)
COMMANDS = {
    "train": ("megatron_ncclep.training.command", "train a mixture-of-experts GPT on text"),
    "run": ("megatron_ncclep.cli.run", "run an unmodified Megatron-LM script with the dispatcher"),
    "render": (
        "megatron_ncclep.cli.render",
        "print the command that three configuration files compose",
    ),
    "bench": ("megatron_ncclep.benchmark.command", "measure engines on this machine"),
    "doctor": ("megatron_ncclep.doctor", "check which engines can run here, and why others cannot"),
    "env": ("megatron_ncclep.cli.env", "list the environment variables and their values"),
}


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line: the usage of `ncclep train` fills a screen."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `ncclep` command with `argv` (default: the process's) and return its exit status.

    A user's mistake (EpError) is printed as one line, with exit status 2.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(
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
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        words = f"unrecognized arguments: {' '.join(unknown)}"
        subparsers.choices[args.command].error(words + getattr(args, "hint", ""))

    def run() -> int:
        if args.command != "doctor":  # the doctor reports it itself
            _check_environment(args.command, argv)
        return int(args.run(args))

    return run_reporting(f"ncclep {args.command}", run)


def _check_environment(command: str, argv: Sequence[str]) -> None:
    """Warn of variables that nothing reads.

    Raises:
        InputError: one that is read has a wrong value.
    """
    for variable in VARIABLES.values():
        variable.get()
    # Options of the command line are laid over these, and the command checks both together.
    if not any(word.startswith(OPTION_FLAG) for word in argv):
        EpConfig.resolve()
    # The ranks of a job warn once, on one of them, when they make an engine.
    if command != "run" and "RANK" not in os.environ:
        for text in unknown_variables().values():
            print(f"ncclep {command}: warning: {text}", file=sys.stderr)
