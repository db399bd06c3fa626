"""What a layer's router may ask for beyond its top-k, and what the engine then takes."""

from __future__ import annotations

from typing import Any

from megatron_ncclep.config import WORST
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.ranks.group import EpGroup


def adds_assignments(config: Any) -> bool:
    """Whether a token may have more experts than the router's top-k.

    With padding to capacity an expert also gets tokens that did not choose it.

    Read for each micro-batch, because Megatron turns it on and off in the config while it generates
    tokens (`set_decode_expert_padding`).
    """
    return bool(config.moe_pad_expert_input_to_capacity)


def require_usable_bound(config: Any, engine: Engine, num_slices: int) -> None:
    """Refuse capacity padding in static mode where the assignments of a token have no usable bound.

    Raises:
        InputError: on every rank, because their options are the same.
    """
    experts, caps = config.num_moe_experts, engine.caps
    rows, problem = engine.config.max_recv_rows, None
    if caps.max_top_k is not None and experts * num_slices > caps.max_top_k:
        in_slices = "" if num_slices == 1 else f", each in {num_slices} slices"
        problem = (
            f"a token may get all {experts} experts{in_slices}, and engine {caps.name!r} takes at "
            f"most {caps.max_top_k} assignments of a token"
        )
    elif isinstance(rows, str) and rows != WORST:
        problem = (
            "a factor counts the assignments of a token, which may be more than the router's "
            f"top-k: give a number of rows or {WORST!r}"
        )
    if problem is not None:
        raise InputError(
            f"moe_pad_expert_input_to_capacity with max_recv_rows={rows!r}: {problem}; or leave "
            "max_recv_rows out: then the host waits for the number of assignments"
        )


def require_columns_for_all_slices(config: Any, engine: Engine, num_slices: int) -> None:
    """Refuse a top-k that, multiplied by the slices, exceeds the engine's limit on assignments.

    Raises:
        InputError: on every rank, whose options are the same.
    """
    top_k, caps = config.moe_router_topk, engine.caps
    if caps.max_top_k is None or top_k * num_slices <= caps.max_top_k:
        return
    most = caps.max_top_k // top_k  # 0: too many even without slices
    smaller = f"set expert_tensor_parallel_size to {most} or less, or " if most else ""
    raise InputError(
        f"moe_router_topk={top_k} with expert tensor parallelism of size {num_slices}: a token is "
        f"sent to all {num_slices} ranks that hold slices of an expert, {top_k * num_slices} "
        f"assignments, and engine {caps.name!r} takes at most {caps.max_top_k}: {smaller}"
        "choose engine 'reference' (--ncclep-engine reference)"
    )


def require_order_of_ranks(group: EpGroup, ep: Any, tp: Any, timeout_s: float) -> None:
    """Refuse groups in which the ranks of an expert are not next to each other.  Collective.

    `ep`, `tp`: Megatron's groups of the ranks with different experts, and with slices of the same.

    Raises:
        UnsupportedError: on every rank.
    """
    problem = None
    if (group.size, group.rank) != (ep.size() * tp.size(), ep.rank() * tp.size() + tp.rank()):
        problem = (
            f"is rank {group.rank} of {group.size} in tp_ep, but rank {tp.rank()} of {tp.size()} "
            f"in expt_tp and rank {ep.rank()} of {ep.size()} in ep"
        )
    if problems := group.hosts.gather_problems(problem, "open", timeout_s):
        raise UnsupportedError(
            f"the process groups of an MoE layer: {problems}: tp_ep must have the ranks of ep and "
            "expt_tp, those of expt_tp next to each other, as Megatron makes it"
        )
