"""What rank 0 shows while it measures: a line that changes on a terminal, otherwise a few lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[str], None]


@contextmanager
def progress(rank: int) -> Iterator[Show]:
    """Give a function that shows what is done next.

    It goes to stderr, so that stdout holds the table only.

    Args:
        rank: only rank 0 shows anything.
    """
    if rank != 0:
        yield lambda text: None
        return
    try:
        from rich.console import Console
    except ImportError:  # an optional package
        yield print_line
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield print_line
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


def print_line(text: str) -> None:
    """Show `text` as a line."""
    print(text, file=sys.stderr, flush=True)
