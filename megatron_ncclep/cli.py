"""The `ncclep` command: one subcommand per module, each imported only when it is used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from megatron_ncclep.version import __version__

# name -> (module with `add_arguments(parser)` and `main(args) -> int`, one line of help)
COMMANDS = {
    "train": ("megatron_ncclep.training.command", "train a mixture-of-experts GPT on text"),
    "run": ("megatron_ncclep.launch", "run an unmodified Megatron-LM script with the dispatcher"),
    "render": ("megatron_ncclep.render", "print the command that three configuration files make"),
    "env": ("megatron_ncclep.envs", "list the environment variables and their values"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `ncclep` command with `argv` (default: the process's) and return its exit status."""
    parser = argparse.ArgumentParser(prog="ncclep", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=import_module(module).__doc__,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
        import_module(module).add_arguments(command)
        command.set_defaults(run=import_module(module).main)
    args = parser.parse_args(argv)
    return args.run(args)
