"""The supported releases of Megatron-Core, and where those that are not installed are found."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

INSTALLED = version("megatron-core")
SUPPORTED = ["0.16.1", "0.17.1", "0.18.2", "0.19.2", "0.20.0"]


def put_first(release: str) -> None:
    """Let this process, and those that it starts, import that release of Megatron-Core.

    Raises:
        AssertionError: it is neither installed nor unpacked; the message says how to get it.
    """
    if release == INSTALLED:
        return
    unpacked = Path(sys.prefix) / "megatron" / release
    assert (unpacked / "megatron" / "core").is_dir(), (
        f"no Megatron-Core {release} in {unpacked}: run scripts/fetch_megatron.sh "
        f"{os.path.relpath(sys.prefix)}"
    )
    assert "megatron.core" not in sys.modules, "another release is imported already"
    sys.path.insert(0, str(unpacked))
    paths = [str(unpacked), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
