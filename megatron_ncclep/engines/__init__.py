"""The registry of engines, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep import envs
from megatron_ncclep.config import (
    AUTO,
    DROP,
    MAX_COUNT,
    EpConfig,
    thousandths,
    unknown_variables,
)
from megatron_ncclep.engines.engine import Engine, EngineCaps
from megatron_ncclep.engines.hierarchical import availability as hierarchical_availability
from megatron_ncclep.engines.hierarchical.engine import CAPS as HIERARCHICAL_CAPS
from megatron_ncclep.engines.hierarchical.engine import HierarchicalEngine
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.engines.native.engine import CAPS as NATIVE_CAPS
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.nccl_ep import availability as nccl_ep_availability
from megatron_ncclep.engines.nccl_ep.engine import CAPS as NCCL_EP_CAPS
from megatron_ncclep.engines.nccl_ep.engine import NcclEpEngine
from megatron_ncclep.engines.reference.engine import CAPS as REFERENCE_CAPS
from megatron_ncclep.engines.reference.engine import ReferenceEngine
from megatron_ncclep.errors import EngineUnavailableError, InputError, PeerError
from megatron_ncclep.libraries.tested import untested_torch
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import START_AGAIN
from megatron_ncclep.version import __version__


@dataclass(frozen=True)
class EngineEntry:
    """One line of the registry.

    Attributes:
        caps: what the engine can do.
        build: makes the engine for a group, a number of experts and a config.
        unavailable_reason: why the engine cannot run for a group with a config and a number of
            experts (None: not known), and the remedy; None if it can run.  Called on every rank of
            the group, and may be collective.
    """

    caps: EngineCaps
    build: Callable[[EpGroup, int, EpConfig], Engine]
    unavailable_reason: Callable[[EpGroup, EpConfig, int | None], str | None]


# Options of Megatron's layer and its dispatcher, which concern no engine.
_OF_THE_LAYER = (
    "experts",
    "gradient_averaging",
    "max_recv_gib",
    "metrics_interval",
    "resync_interval",
)
# In the order of preference of "auto".
ENGINES: dict[str, EngineEntry] = {
    "native": EngineEntry(NATIVE_CAPS, NativeEngine, native_availability.unavailable_reason),
    "hierarchical": EngineEntry(
        HIERARCHICAL_CAPS, HierarchicalEngine, hierarchical_availability.unavailable_reason
    ),
    "nccl_ep": EngineEntry(NCCL_EP_CAPS, NcclEpEngine, nccl_ep_availability.unavailable_reason),
    "reference": EngineEntry(
        REFERENCE_CAPS, ReferenceEngine, lambda group, config, num_experts: None
    ),
}


# What an engine keeps may be written to later, outside of a user's inference mode.
@torch.inference_mode(False)
def create_engine(
    process_group: dist.ProcessGroup,
    num_experts: int,
    config: EpConfig | Mapping[str, Any] | None = None,
    ranks_per_expert: int = 1,
) -> Engine:
    """Make the engine that `config.engine` names for one expert-parallel group.  Collective.

    Rank r of R holds the experts r * E / R to (r + 1) * E / R - 1.

    Args:
        process_group: the expert-parallel group; its rank order is the experts' order.
        num_experts: E, experts of the whole group.
        config: options, or a mapping of them; default: those of the environment.  The same on all
            ranks, except for timeout_s and first_timeout_s, which each rank may choose for itself.
        ranks_per_expert: topk_idx will have this many copies of each assignment, each for a
            different rank (ops/expert_slices.py).  This only makes max_recv_rows="worst" smaller;
            it does not allow routings without these copies.

    Raises:
        InputError: on every rank, when the name is unknown, the experts cannot be divided evenly
            over the ranks, the engine would ignore an option, the environment's options are
            invalid, or the ranks' arguments differ.
        EngineUnavailableError: the named engine cannot run here; says why.
        GroupClosedError: the process group was destroyed.
        PeerError: a rank did not come in time, or the group's ranks are out of step since an
            earlier PeerError: close the group first (`megatron_ncclep.close`), on all ranks.
    """
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is not a member of the expert-parallel group it was given")
    if not isinstance(process_group, dist.ProcessGroup):
        raise InputError(
            f"process_group is {process_group!r}: give a group of torch.distributed, such as "
            "torch.distributed.group.WORLD, after init_process_group"
        )
    group = EpGroup.of(process_group)
    problem = None
    try:
        envs.get("NCCLEP_HOST_EXCHANGE")  # the first exchange reads it, too late to report an error
        config = EpConfig.resolve() if config is None else EpConfig.of(config, "config")
    except InputError as error:
        config, problem = EpConfig(), str(error)
    problem = problem or _failure_of(group) or _problem(group, num_experts, config)
    if not (isinstance(ranks_per_expert, int) and 1 <= ranks_per_expert <= group.size):
        problem = problem or (
            f"ranks_per_expert is {ranks_per_expert!r}: it must be a whole number from 1 to the "
            f"{group.size} ranks of the group"
        )
    group.begin_first_step()
    values: dict[str, int | str | None] = {}
    if problem is None:  # otherwise num_experts may not even be a number
        values = {
            "version of megatron_ncclep": __version__,
            "num_experts": num_experts,
            **config.common(),
            "ranks_per_expert": ranks_per_expert,
        }
    group.hosts.agree("open", values, problem, group.deadline_s(config))
    name, reason = choose_engine(group, config, num_experts)
    _announce(group, name, reason, config)
    engine = ENGINES[name].build(group, num_experts, config)
    engine.ranks_per_expert = ranks_per_expert
    return engine


def choose_engine(
    group: EpGroup, config: EpConfig, num_experts: int | None = None
) -> tuple[str, str]:
    """Return the name of the engine to use and the reason, without making it.  Collective.

    The reason has a line for each engine that was passed over, and a last one for the chosen one.

    All ranks choose the same engine: one that cannot run on some rank is not used on any.

    Raises:
        EngineUnavailableError: on every rank, when the named engine (with "auto": any) cannot run.
    """
    is_auto, reasons = config.engine == AUTO, list[str]()
    for name in ENGINES if is_auto else (config.engine,):
        reason = group.hosts.gather_problems(
            _unavailable_reason(name, group, config, num_experts), "open", group.deadline_s(config)
        )
        if not reason:
            why = f"{name} can run" if is_auto else "requested by name"
            return name, "\n".join([*reasons, why])
        reasons.append(f"not {name}: {reason}")
        if not is_auto:
            raise EngineUnavailableError(f"engine {name!r} cannot run here: {reason}")
    raise EngineUnavailableError(f"no engine can run: {'; '.join(reasons)}")


def _unavailable_reason(
    name: str, group: EpGroup, config: EpConfig, num_experts: int | None
) -> str | None:
    """Say why the engine cannot run for this group with these options.  May be collective."""
    entry = ENGINES[name]
    if problem := _ignored_options(entry.caps, config):
        return problem
    if group.size < entry.caps.min_ranks:
        return f"it needs at least {entry.caps.min_ranks} ranks, the group has {group.size}"
    declared, most = config.max_tokens_per_rank, entry.caps.max_tokens
    if declared is not None and most is not None and declared > most:
        return f"max_tokens_per_rank {declared}: it takes at most {most} tokens on a rank"
    most = entry.caps.max_local_experts
    if num_experts is not None and most is not None and num_experts > most * group.size:
        return f"it takes at most {most} experts on a rank: {num_experts} need more ranks"
    return entry.unavailable_reason(group, config, num_experts)


def _failure_of(group: EpGroup) -> str | None:
    """Say that a wait has failed on this rank's device, so that the group cannot be used."""
    try:
        group.raise_failure()
    except PeerError as error:
        return f"the group has failed: {error}; {START_AGAIN}"
    except InputError:  # closing the engines that refused a call, or differ, is enough
        return None
    return None


def _problem(group: EpGroup, num_experts: int, config: EpConfig) -> str | None:
    """Say what is wrong with this rank's arguments of create_engine, if anything is."""
    if config.engine != AUTO and config.engine not in ENGINES:
        return f"engine {config.engine!r} is unknown: this version has {AUTO!r} and {list(ENGINES)}"
    if not isinstance(num_experts, int):
        kind = type(num_experts).__name__
        return f"num_experts is {num_experts!r}, a {kind}: it must be a whole number"
    if not 1 <= num_experts <= MAX_COUNT or num_experts % group.size:
        return (
            f"{num_experts} experts cannot be divided over {group.size} ranks: choose a number of "
            "experts that is a positive multiple of the expert-parallel size"
        )
    if config.max_recv_rows == AUTO:
        return (
            f"max_recv_rows is {AUTO!r}, which is for Megatron's layers, where it follows "
            "the load of the last steps: give an engine a number, a factor or 'worst'"
        )
    rows = config.max_recv_rows
    # With max_tokens_per_rank it is a factor of a batch that may be rare.
    always_drops = config.on_overflow == DROP and config.max_tokens_per_rank is None
    if isinstance(rows, str) and always_drops and (thousandths(rows) or 1000) < 1000:
        return (
            f"max_recv_rows is {rows!r} and on_overflow {DROP!r}: even of a balanced load rows are "
            "dropped: set '1x' or more, or, where tokens have fewer experts than top-k, a number"
        )
    if config.engine != AUTO:
        return _ignored_options(ENGINES[config.engine].caps, config)
    return None


def _ignored_options(caps: EngineCaps, config: EpConfig) -> str | None:
    """Say which of the given options the engine would ignore, if any."""
    ignored = sorted(set(config.non_default()) - caps.options - {"engine", *_OF_THE_LAYER})
    if not ignored:
        return None
    return (
        f"engine {caps.name!r} would ignore {', '.join(ignored)}: leave it out, or choose an "
        "engine that has it"
    )


def _announce(group: EpGroup, name: str, reason: str, config: EpConfig) -> None:
    """Log the engine and the effective options, once per group and only on its first rank."""
    own = {"timeout_s": config.timeout_s, "first_timeout_s": config.first_deadline_s}
    values = config.common() | own
    options = ", ".join(f"{k}={values[k]}" for k in sorted(ENGINES[name].caps.options))
    *others, why = reason.split("\n")
    for text in (f"engine {name!r} for {group.size} ranks ({why})", *others, options):
        group.announce(text)
    for text in filter(None, (untested_torch(), *unknown_variables().values())):
        group.announce(text, logging.WARNING)
