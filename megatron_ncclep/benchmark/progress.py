"""What rank 0 shows while it measures: a line that changes on a terminal, otherwise a few lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Shows what is measured now, and which part of it.
Show = Callable[[str, str], None]


@contextmanager
def progress(rank: int) -> Iterator[Show]:
    """Give a function that shows what is done next.

    It goes to stderr, so that stdout holds the table only.

    Args:
        rank: only rank 0 shows anything.
    """
    if rank != 0:
        yield lambda what, part: None
        return
    try:
        from rich.console import Console
    except ImportError:  # an optional package
        yield line_printer()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield line_printer()
        return
    with console.status("") as status:
        yield lambda what, part: status.update(f"{what}: {part}" if part else what)


def line_printer() -> Show:
    """Make a function that prints a line whenever something else is measured."""
    shown = ""

    def show(what: str, part: str) -> None:
        nonlocal shown
        if what != shown:
            print(what, file=sys.stderr, flush=True)
        shown = what

    return show
