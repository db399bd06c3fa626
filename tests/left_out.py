"""Tests that a run leaves out: not skipped, so that no report counts them, and listed at its end.

With several workers each of them collects all tests, and the process that prints collects none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

# What is left out -> why.
LEFT_OUT = pytest.StashKey[dict[str, str]]()
TO_THE_PRINTER = "left_out"


def leave_out(
    config: pytest.Config, items: list[pytest.Function], reasons: Mapping[pytest.Function, str]
) -> None:
    """Take tests from `items`.

    Args:
        config: of the run.
        items: the tests collected so far.
        reasons: test -> why it is left out; "": nobody needs to be told.
    """
    told = config.stash.setdefault(LEFT_OUT, {})
    told.update({name_of(item): why for item, why in reasons.items() if why})
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def name_of(item: pytest.Function) -> str:
    """Without what parametrizes it."""
    return item.nodeid.partition("[")[0]


def tell_the_printer(config: pytest.Config) -> None:
    """Called in each worker when it ends."""
    if hasattr(config, "workeroutput"):
        config.workeroutput[TO_THE_PRINTER] = config.stash.get(LEFT_OUT, {})


def told_by(config: pytest.Config, worker: Any) -> None:
    """Called in the process that prints when a worker has ended."""
    told = config.stash.setdefault(LEFT_OUT, {})
    told.update(getattr(worker, "workeroutput", {}).get(TO_THE_PRINTER, {}))


def print_left_out(reporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for each test."""
    for name, reason in config.stash.get(LEFT_OUT, {}).items():
        reporter.write_line(f"LEFT OUT {name}: {reason}")
