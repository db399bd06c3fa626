"""Tests that a run leaves out: not skipped, so that no report counts them, and listed at its end.

With several workers each of them collects all tests, and the process that prints collects none.
The functions named pytest_... are hooks of tests/conftest.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

# What is left out -> why.
DESELECTED = pytest.StashKey[dict[str, str]]()
OF_WORKER = "deselected"
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="TransformerEngine is not installed",
)


def leave_out(
    config: pytest.Config, items: list[pytest.Function], reasons: Mapping[pytest.Function, str]
) -> None:
    """Take tests from `items`, the tests collected so far.

    Args:
        config: of the run.
        items: is changed.
        reasons: test -> why it is left out; "": goes without saying.
    """
    listed = {item.nodeid.partition("[")[0]: why for item, why in reasons.items() if why}
    config.stash.setdefault(DESELECTED, {}).update(listed)
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the list of a worker over."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[OF_WORKER] = session.config.stash.get(DESELECTED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over the list of a worker."""
    listed = getattr(node, "workeroutput", {}).get(OF_WORKER, {})
    node.config.stash.setdefault(DESELECTED, {}).update(listed)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, reason in config.stash.get(DESELECTED, {}).items():
        terminalreporter.write_line(f"LEFT OUT {name}: {reason}")
