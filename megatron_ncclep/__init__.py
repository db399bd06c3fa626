"""megatron_ncclep: the Megatron-Core MoE token dispatcher `ncclep`.

Importing this package has no side effects and needs neither CUDA nor Megatron-Core: the names below
are loaded when they are first used.  The two differentiable steps are
`megatron_ncclep.dispatch.dispatch` and `megatron_ncclep.combine.combine`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ncclep.version import __version__

if TYPE_CHECKING:
    from megatron_ncclep.config import EpConfig
    from megatron_ncclep.engines import create_engine
    from megatron_ncclep.engines.engine import Engine, RoutePlan
    from megatron_ncclep.integration import install

_HOME = {
    "EpConfig": "config",
    "Engine": "engines.engine",
    "RoutePlan": "engines.engine",
    "create_engine": "engines",
    "install": "integration",
}

__all__ = [
    "Engine",
    "EpConfig",
    "RoutePlan",
    "__version__",
    "create_engine",
    "install",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
