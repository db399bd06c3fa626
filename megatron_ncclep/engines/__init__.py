"""The engines by name, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.engine import Engine, EngineCaps
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.reference import CAPS as REFERENCE_CAPS
from megatron_ncclep.engines.reference import ReferenceEngine
from megatron_ncclep.errors import EngineUnavailableError, InputError


@dataclass(frozen=True)
class EngineEntry:
    """One line of the registry.

    Attributes:
        caps: what the engine can do.
        build: makes the engine for a group, a number of experts and a config.
        obstacle: says why the engine cannot run for a group and what would help; None if it can.
    """

    caps: EngineCaps
    build: Callable[[EpGroup, int, EpConfig], Engine]
    obstacle: Callable[[EpGroup], str | None]


# In the order of preference of "auto".
ENGINES: dict[str, EngineEntry] = {
    "reference": EngineEntry(REFERENCE_CAPS, ReferenceEngine, lambda group: None),
}


def create_engine(
    process_group: dist.ProcessGroup, num_experts: int, config: EpConfig | None = None
) -> Engine:
    """Make the engine that `config.engine` names for one expert-parallel group.  Collective.

    Rank r of R holds the experts r * E / R to (r + 1) * E / R - 1.

    Args:
        process_group: the expert-parallel group; its rank order is the experts' order.
        num_experts: E, experts of the whole group.
        config: options; default: those of the environment.

    Raises:
        InputError: on every rank, when the name is unknown, experts cannot be divided over the
            ranks, an option would be ignored by the engine, or the ranks' arguments differ.
        EngineUnavailableError: the named engine cannot run here; says why.
        GroupClosedError: the process group was destroyed.
        PeerError: a rank did not come in time.
    """
    config = config or EpConfig.resolve()
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is not a member of the expert-parallel group it was given")
    group = EpGroup.of(process_group)
    name, reason = choose_engine(group, config)
    entry = ENGINES.get(name)
    group.agree(
        "open",
        {"num_experts": num_experts, "engine": list(ENGINES).index(name) if entry else None},
        _problem(entry, name, group, num_experts, config),
        config.timeout_s,
    )
    assert entry is not None  # agreed on above
    obstacle = entry.obstacle(group)
    group.agree(
        "open",
        {},
        obstacle and f"engine {name!r} cannot run here: {obstacle}",
        config.timeout_s,
        error=EngineUnavailableError,
    )
    _announce(group, name, reason, config)
    return entry.build(group, num_experts, config)


def choose_engine(group: EpGroup, config: EpConfig) -> tuple[str, str]:
    """Return the name of the engine to use and the reason, without making it."""
    if config.engine != "auto":
        return config.engine, "asked for by name"
    reasons: list[str] = []
    for name, entry in ENGINES.items():
        obstacle = entry.obstacle(group)
        if obstacle is None:
            return name, "; ".join([*reasons, f"{name} can run"])
        reasons.append(f"not {name}: {obstacle}")
    raise EngineUnavailableError(f"no engine can run: {'; '.join(reasons)}")


def _problem(
    entry: EngineEntry | None, name: str, group: EpGroup, num_experts: int, config: EpConfig
) -> str | None:
    """Say what is wrong with this rank's arguments of create_engine, if anything is."""
    if entry is None:
        return f"engine {name!r} is unknown: this version has 'auto' and {sorted(ENGINES)}"
    if num_experts <= 0 or num_experts % group.size:
        return (
            f"{num_experts} experts cannot be divided over {group.size} ranks: choose a number of "
            "experts that is a positive multiple of the expert-parallel size"
        )
    ignored = sorted(set(config.non_default()) - entry.caps.options - {"engine"})
    if ignored:
        return (
            f"engine {name!r} would ignore {', '.join(ignored)}: leave it out, or choose an "
            "engine that has it"
        )
    return None


def _announce(group: EpGroup, name: str, reason: str, config: EpConfig) -> None:
    """Log the engine and the effective options, once per group and only on its first rank."""
    options = ", ".join(f"{k}={getattr(config, k)}" for k in sorted(ENGINES[name].caps.options))
    text = f"engine {name!r} for {group.size} ranks ({reason}); {options}"
    if group.rank == 0:
        group.log_once(logging.INFO, text, text)
