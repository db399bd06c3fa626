"""List the environment variables that ncclep reads, their current values, and what they mean.

An option given in code or on the command line takes precedence over its variable.  Any other
variable whose name begins with NCCLEP_ causes a warning that names it: nothing reads it.
"""

from __future__ import annotations

import argparse

from megatron_ncclep.config import VARIABLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`ncclep env` takes no arguments."""


def main(args: argparse.Namespace) -> int:
    """Print the table of variables with their current values."""
    width = max(map(len, VARIABLES))
    for variable in VARIABLES.values():
        value = variable.get()
        shown = "not set" if value is None else str(value)
        print(f"{variable.name:{width}}  {shown:8}  {variable.meaning}")
    return 0
