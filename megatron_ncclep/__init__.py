"""megatron_ncclep: the Megatron-Core MoE token dispatcher `ncclep`.

Importing this package has no side effects and needs neither CUDA nor Megatron-Core: the names below
are loaded when they are first used.  The two differentiable steps are
`megatron_ncclep.dispatch.dispatch` and `megatron_ncclep.combine.combine`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ncclep.version import __version__

if TYPE_CHECKING:
    from megatron_ncclep.config import EpConfig
    from megatron_ncclep.engines import create_engine
    from megatron_ncclep.engines.engine import Engine, RoutePlan
    from megatron_ncclep.integration.hooks import install

_HOME = {
    "EpConfig": "config",
    "Engine": "engines.engine",
    "RoutePlan": "engines.engine",
    "create_engine": "engines",
    "install": "integration.hooks",
}

__all__ = [
    "Engine",
    "EpConfig",
    "RoutePlan",
    "__version__",
    "check",
    "create_engine",
    "install",
]


def check() -> None:
    """Raise what went wrong on the device and no call of an engine has raised.  Not collective.

    An engine whose kernels wait for other ranks cannot raise when such a wait passes its deadline:
    it delivers NaN, and its next call raises.  For what no call follows, the last layer of a step
    before the optimizer or a checkpoint takes its gradients, or a replayed CUDA graph, call this on
    every rank, on the stream that replays the graph.  It waits for what is queued in groups with
    such an engine, and costs nothing where there is none.

    Nor does an engine in static mode wait to hear of rows that did not fit.  With
    `on_overflow="raise"` this raises it, and waits for the current stream; with "drop" it logs a
    warning, once for each group, without waiting: on a GPU at the next call but one.

    The first check after an engine's first calls ends its first step, in which ranks wait for each
    other for longer (the option `first_timeout_s`): call it in every step.

    Raises:
        PeerError: results since then are NaN, wholly or in part: use none of them, and stop.
        RowsDroppedError: rows did not fit since the last call; the same on all ranks of the group,
            which can go on: gradients since then are wrong on all of them.
    """
    # Where nobody has imported engines there are no groups; importing them would import torch.
    groups = sys.modules.get(f"{__name__}.ranks.group")
    if groups is not None:
        groups.check_all()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
