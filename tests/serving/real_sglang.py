"""SGLang's own modules on a CPU, as scripts/fetch_servers.sh unpacks them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tomllib
import torch

RELEASE = "0.5.23"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "sglang.srt.plugins"


def folder() -> Path:
    return Path(sys.prefix) / "sglang" / RELEASE


def unavailable_reason() -> str | None:
    if not (folder() / "sglang").is_dir():
        return f"no SGLang {RELEASE}: run scripts/fetch_servers.sh with Python 3.12"
    if torch.version.cuda is None:
        return "SGLang imports torchvision, whose wheel needs a torch that is built with CUDA"
    return None


def load() -> None:
    """Let this process import it, and let it load its plugins: ours, from pyproject.toml."""
    if str(folder()) not in sys.path:
        # Last, so that what this environment has comes first.
        sys.path += [str(folder()), str(Path(sys.prefix) / "servers")]
    from sglang.srt import plugins

    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
    with mock.patch.object(plugins, "entry_points", lambda group: points if group == GROUP else []):
        plugins.load_plugins()


@contextmanager
def running(group: Any, rank: int, backend: str = "ncclep") -> Iterator[None]:
    """In a model of data-parallel attention over the ranks of `group`."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    size = 2
    ranks = SimpleNamespace(device_group=group)
    moe = runtime_context.get_flags().moe
    moe.a2a_backend = MoeA2ABackend(backend)
    with runtime_context.get_parallel().override(
        moe_ep_group=ranks, tp_group=ranks, moe_ep_size=size, moe_ep_rank=rank, tp_size=size,
        dwdp_size=1,
    ):  # fmt: skip
        yield


def methods(of: str) -> set[str]:
    """The methods of a class of SGLang's scheduler, whose import needs a GPU's packages."""
    source = (folder() / "sglang/srt/managers/scheduler.py").read_text()
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == of)
    return {node.name for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
