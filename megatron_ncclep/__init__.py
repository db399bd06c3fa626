"""megatron_ncclep: the Megatron-Core MoE token dispatcher `ncclep`.

Importing this package has no side effects and needs neither CUDA nor Megatron-Core: the names below
are loaded on first use.  `dispatch` and `combine` are the two differentiable steps.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ncclep.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_ncclep.config import EpConfig
    from megatron_ncclep.engines import create_engine
    from megatron_ncclep.engines.engine import Engine, RoutePlan
    from megatron_ncclep.integration.hooks import install
    from megatron_ncclep.ops.combine import combine
    from megatron_ncclep.ops.dispatch import dispatch

_HOME = {
    "EpConfig": "config",
    "Engine": "engines.engine",
    "RoutePlan": "engines.engine",
    "combine": "ops.combine",
    "create_engine": "engines",
    "dispatch": "ops.dispatch",
    "install": "integration.hooks",
}

__all__ = [
    "Engine",
    "EpConfig",
    "RoutePlan",
    "__version__",
    "check",
    "close",
    "combine",
    "create_engine",
    "dispatch",
    "install",
    "release_memory",
]


def check() -> None:
    """Raise the device's errors that no call of an engine has raised yet.  Not collective.

    An engine whose kernels wait for other ranks cannot raise when such a wait passes its deadline:
    it delivers NaN, and its next call raises.  If no call follows, call this function on every
    rank: after the last layer of a step, before the optimizer or a checkpoint uses its gradients,
    and after a CUDA graph, on the stream that replays it.  It waits for the queued work of groups
    with such an engine, and costs nothing if there are none.

    In static and low-latency mode no call waits to learn whether a routing names an index that is
    not an expert, or an expert twice: such assignments are not routed, and this function raises the
    error.  When all ranks of a group call it after the same calls, all raise the same error.

    Nor does a call in static mode wait to learn whether all rows fit.  With `on_overflow="raise"`
    this function raises that error, and waits for the current stream; with "rerun" too, but there
    steps of Megatron's schedules leave nothing to report.  With "drop" it logs a warning, once per
    group, without waiting: on a GPU at the next call but one.

    The first check after an engine's first calls ends its first step, in which ranks wait longer
    for each other (the option `first_timeout_s`): call it in every step.

    Raises:
        PeerError: a wait failed; results since then are NaN, wholly or in part: use none of them,
            and stop.
        RefusedError: the same, because a rank has refused a call; says which one, and why.
        InputError: a routing since the last check was wrong; the same text on all ranks of the
            group, which stays usable: outputs and gradients since then lack those assignments.
        RowsDroppedError: rows did not fit since the last check; the same on all ranks of the group,
            which stays usable: gradients since then are wrong on all of them.
    """
    if groups := _groups():
        groups.check_all()


def close(process_group: ProcessGroup | None = None) -> None:
    """Free everything that an expert-parallel group's engines hold.  Collective over the group.

    That is the communicator, the windows and other GPU memory, the memory that hosts share, and
    their threads and descriptors.  Call it on every rank before another model is built in the same
    process.  Megatron's `destroy_model_parallel()` calls it for its expert-parallel groups.
    Idempotent: does nothing for a group without engines.

    Engines, dispatchers and low-latency objects made before raise GroupClosedError from then on.
    New ones can be made for the same process group at once.  CUDA graphs that hold calls of the old
    ones must not be replayed.

    Waits for the other ranks for at most the `timeout_s` of the engine made last.  If they do not
    come or have died, or if the process group was destroyed, this rank frees its own part without
    them.  If its device stays busy until the deadline, that part is freed once the device is idle.
    Both are logged as warnings, and no error.

    Args:
        process_group: the expert-parallel group; None: all groups for which this process has made
            engines, in the order of their first engines.

    Raises:
        InputError: `process_group` is no process group.
    """
    if groups := _groups():
        groups.close_groups(process_group)


def release_memory(
    process_group: ProcessGroup | None = None, *, graphs_are_dropped: bool = False
) -> None:
    """Give back GPU memory that the next calls make again.  Collective over the group.

    Between phases, as when reinforcement learning hands the GPU to a generator.  Engines, models,
    plans and low-latency objects stay as they are: windows, staging memory and low-latency objects
    are made again, as large as they were, by the calls that next use them, on all ranks.  The
    communicator stays, and tensors are torch's (`torch.cuda.empty_cache()`).  Calls `check()`.

    Args:
        process_group: the expert-parallel group; None: all groups for which this process has made
            engines, in the order of their first engines.
        graphs_are_dropped: you have dropped all CUDA graphs that hold calls of the group, and will
            capture new ones: a replay would write to memory that is no longer its own.

    Raises:
        InputError: on every rank, and nothing was released: on some rank a CUDA graph holds calls
            of the group, or is being captured, or a low-latency dispatch still has no combine; or
            the ranks' arguments differ, or `process_group` is no process group.
        PeerError: a rank did not come in time, or is in a different call.
        RefusedError, RowsDroppedError: see `check`.
    """
    if groups := _groups():
        groups.release_memory(process_group, graphs_are_dropped)


def _groups() -> Any:
    """The module that lists the groups of this process; None if there cannot be any.

    If engines were never imported, there are no groups; importing them would import torch.
    """
    return sys.modules.get(f"{__name__}.ranks.group")


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
