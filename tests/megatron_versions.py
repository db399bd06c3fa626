"""The supported versions of Megatron-Core, and where those that are not installed are found."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

INSTALLED = version("megatron-core")
SUPPORTED = ["0.16.1", "0.17.1", "0.18.2", "0.19.2"]


def importable() -> list[str]:
    """0.17 and later need Python 3.12; the oldest runs on every Python we support."""
    return SUPPORTED if sys.version_info >= (3, 12) else [INSTALLED]


def python_path(megatron_version: str) -> list[str]:
    """What a child process needs in front of its PYTHONPATH to import that version.

    Raises:
        AssertionError: it is neither installed nor unpacked; the message says how to get it.
    """
    if megatron_version == INSTALLED:
        return []
    unpacked = Path(sys.prefix) / "megatron" / megatron_version
    assert (unpacked / "megatron" / "core").is_dir(), (
        f"no Megatron-Core {megatron_version} in {unpacked}: run scripts/fetch_megatron.sh "
        f"{os.path.relpath(sys.prefix)}"
    )
    return [str(unpacked)]
