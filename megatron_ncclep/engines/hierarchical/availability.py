"""Whether the engine `hierarchical` can run for a group, and with which engine inside the nodes."""

from __future__ import annotations

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.errors import EngineUnavailableError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Grid, grid_of

NAME = "hierarchical"


def engine_inside(
    group: EpGroup, grid: Grid, config: EpConfig, num_experts: int | None
) -> tuple[str, str]:
    """Choose the engine inside the nodes, the same on all nodes.  Collective.

    `num_experts`: of the whole group; None: skip the engines' limits on experts.

    Returns:
        "native" or "reference", and in the latter case why "native" cannot run.
    """
    if group.device.type != "cuda":
        return "reference", "not native: there are no GPUs"
    inside = None if num_experts is None else num_experts // grid.nodes.count
    reason = native_availability.unavailable_reason(grid.local, config, inside)
    what = "open, choosing the engine inside a node"
    if problems := group.hosts.gather_problems(reason, what, group.deadline_s(config)):
        return "reference", f"not native: {problems}"
    return "native", ""


def unavailable_reason(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`, or why "auto" does not choose it.  Collective."""
    is_auto = config.engine != NAME
    if is_auto and group.device.type != "cuda":
        return "it needs GPUs, unless it is asked for by name"
    try:
        grid = grid_of(group, group.deadline_s(config))
    except EngineUnavailableError as error:  # on all ranks
        return str(error)
    if is_auto and grid.nodes.count == 1:
        return "all ranks are on one node"
    name, reason = engine_inside(group, grid, config, num_experts)
    if name == "native":
        return None
    if is_auto:
        return f"inside a node, {reason}"
    if config.num_sms is not None:
        return f"it would ignore num_sms, which 'native' has, and inside a node, {reason}"
    return None
