"""The package's logger says what it has to say, whatever others do to Python's logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

NO_HANDLER = """
logging.getLogger().handlers.clear()
"""
# AReaL's, whenever one of its modules asks for a logger; logging.getLogger() is still the old one.
NEW_ROOT = """
root = logging.RootLogger(logging.WARNING)
logging.Logger.root, logging.Logger.manager = root, logging.Manager(root)
logging.getLogger("theirs")
"""
OTHERS = """
logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
"""


@pytest.mark.parametrize("changes", [NO_HANDLER, NO_HANDLER + OTHERS, NEW_ROOT])
def test_every_line_is_seen(changes: str) -> None:
    """In AReaL the log did not say which engine runs, nor that rows were dropped: its dictConfig
    disables all loggers that it does not name, and its new root logger has no handlers.
    """
    program = f"""
import logging, logging.config
logging.getLogger().addHandler(logging.NullHandler())
from megatron_ncclep.logs import get_logger
get_logger().info("first")
{changes}
get_logger().info("engine"), get_logger().warning("rows")
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.stderr.splitlines() == ["ncclep: engine", "ncclep: rows"], done.stderr
