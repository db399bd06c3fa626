"""Argument checks of plan, dispatch and combine, with error texts, for every engine.

Each function returns None or a sentence with the value and the remedy.  It does not raise: the
engine first sends the sentence to the other ranks (`Hosts.agree`), so that all of them raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.engine import (
    BYTES,
    NOT_ROUTED,
    TOO_MANY_EXPERTS,
    EngineCaps,
    RoutePlan,
)


@dataclass(frozen=True)
class Wrong:
    """Takes the place of a wrong argument in a call, which then raises `problem` on all ranks."""

    problem: str


def type_problem(name: str, value: object) -> str | None:
    """Say that `value` is not a tensor of this rank alone, if so."""
    if type(value) is torch.Tensor:
        if value.layout is torch.strided and not value.is_nested:
            return None
        kind = "nested" if value.is_nested else "sparse"
        return f"{name} is a {kind} tensor: give a dense one"
    if isinstance(value, Wrong):
        return value.problem
    if not isinstance(value, torch.Tensor):
        return f"{name} is a {type(value).__name__}: it must be a torch.Tensor"
    if hasattr(value, "to_local"):
        return f"{name} is a {type(value).__name__}: give this rank's part of it, {name}.to_local()"
    return None


def routing_shape(topk_idx: object) -> tuple[int, ...]:
    """The shape of the routing argument, whatever it is; never empty."""
    return tuple(getattr(topk_idx, "shape", ())) or (0,)


def device_problem(name: str, tensor: torch.Tensor, device: torch.device) -> str | None:
    """Say what is wrong with the device of `tensor`, if it is not `device`.

    Where one of the two has no index, as on the CPU, only the type is compared.
    """
    if tensor.device == device:
        return None
    if tensor.device.type == device.type:
        if None in (tensor.device.index, device.index):
            return None
        return (
            f"{name} is on {tensor.device}, but the group is on {device}, which was this rank's "
            f"current device when its first engine was made: move it with .to('{device}'), or call "
            "torch.cuda.set_device before making the engine"
        )
    return (
        f"{name} is on {tensor.device}, but the process group moves {device.type} tensors: move it "
        f"with .to('{device.type}'), or make the group with a backend for {tensor.device.type}"
    )


def topk_shape_problem(
    topk_idx: torch.Tensor, device: torch.device, caps: EngineCaps
) -> str | None:
    """Say what is wrong with the routing apart from its values.  Does not wait."""
    if problem := type_problem("topk_idx", topk_idx):
        return problem
    if topk_idx.dim() != 2:
        return f"topk_idx has shape {list(topk_idx.shape)}: it must be [num_tokens, top_k]"
    if topk_idx.dtype not in (torch.int32, torch.int64):
        return f"topk_idx is {topk_idx.dtype}: it must be int32 or int64"
    if problem := device_problem("topk_idx", topk_idx, device):
        return problem
    num_tokens, top_k = topk_idx.shape
    if top_k == 0:
        return "topk_idx has top_k 0: it needs at least one column (fill it with -1 if need be)"
    if caps.max_top_k is not None and top_k > caps.max_top_k:
        return (
            f"topk_idx has top_k {top_k}: engine {caps.name!r} takes at most {caps.max_top_k}; "
            "choose another engine"
        )
    if caps.max_tokens is not None and num_tokens > caps.max_tokens:
        return (
            f"topk_idx has {num_tokens} tokens: engine {caps.name!r} takes at most "
            f"{caps.max_tokens} on a rank; use smaller micro-batches or another engine"
        )
    return None


def topk_value_problem(topk_idx: torch.Tensor, num_experts: int) -> str | None:
    """Say what is wrong with the values of a routing whose shape is right.  Waits for the device:
    an engine that must not wait checks them in its own kernel.

    That is an index that is neither an expert nor `NOT_ROUTED` (`TOO_MANY_EXPERTS` included), or an
    expert that a token names twice.
    """
    ordered, is_wrong = wrong_indices(topk_idx, num_experts)
    if not is_wrong.any():
        return None
    too_many = topk_idx == TOO_MANY_EXPERTS
    outside = (topk_idx < NOT_ROUTED) | (topk_idx >= num_experts)
    if too_many.any():
        token, _ = _first(too_many)
        return (
            f"the routing map names more than top_k={topk_idx.shape[1]} experts for token {token}: "
            "a router that adds assignments needs a larger top_k"
        )
    if outside.any():
        token, slot = _first(outside)
        return (
            f"expert index {int(topk_idx[token, slot])} of token {token}, top-k slot "
            f"{slot}, is out of range: there are {num_experts} experts, and {NOT_ROUTED} "
            "means not routed"
        )
    token, slot = _first(is_wrong)
    return f"token {token} names expert {int(ordered[token, slot])} twice: name it once"


def wrong_indices(topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's indices in ascending order, and which of them are wrong.  Does not wait."""
    ordered = topk_idx.sort(dim=1).values
    is_wrong = (ordered < NOT_ROUTED) | (ordered >= num_experts)
    is_wrong[:, 1:] |= (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NOT_ROUTED)
    return ordered, is_wrong


def _first(is_wrong: torch.Tensor) -> list[int]:
    """Token and column of the first True."""
    first: list[int] = is_wrong.nonzero()[0].tolist()
    return first


def weight_dtype(payload: torch.Tensor) -> torch.dtype:
    """The dtype in which weights travel: fp32, or fp64 with an fp64 payload (gradient checks)."""
    return torch.float64 if payload.dtype == torch.float64 else torch.float32


def rows_problem(
    is_dispatch: bool,
    plan: RoutePlan,
    rows: torch.Tensor,
    w: torch.Tensor | None,
    caps: EngineCaps,
    device: torch.device,
) -> str | None:
    """Say what is wrong with the arguments of dispatch (`is_dispatch`) or combine of `Engine`.

    Dispatch only copies `rows`, its x; combine adds them up, its y.
    """
    name = "x" if is_dispatch else "y"
    num_rows = plan.num_tokens if is_dispatch else plan.num_rows
    if problem := type_problem(name, rows):
        return problem
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        return f"{name} has shape {list(rows.shape)}: the plan expects [{num_rows}, hidden]"
    if problem := device_problem(name, rows, device):
        return problem
    if rows.dtype == BYTES and not is_dispatch:
        return f"{name} is {BYTES}: combine cannot add up rows of bytes; dispatch moves them"
    if rows.dtype not in caps.payload_dtypes and not (rows.dtype == BYTES and caps.moves_bytes):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in caps.payload_dtypes)
        also = f", and in dispatch {BYTES}" if is_dispatch and caps.moves_bytes else ""
        return f"{name} is {rows.dtype}: engine {caps.name!r} moves {known}{also}"
    row_bytes = rows.shape[1] * rows.element_size()
    if row_bytes == 0 or row_bytes % caps.row_bytes_multiple:
        return (
            f"a row of {name} has {row_bytes} bytes: engine {caps.name!r} needs a positive "
            f"multiple of {caps.row_bytes_multiple}; change the hidden size"
        )
    if w is None:
        return None
    if problem := type_problem("w", w):
        return problem
    shape = (plan.num_tokens, plan.top_k) if is_dispatch else (plan.num_rows,)
    if tuple(w.shape) != shape:
        return f"w has shape {list(w.shape)}: the plan expects {list(shape)}"
    if w.dtype != weight_dtype(rows):
        return f"w is {w.dtype}: with {rows.dtype} rows it must be {weight_dtype(rows)}"
    return device_problem("w", w, device)


def plan_problem(plan: RoutePlan, kind: type[RoutePlan], engine: Any) -> str | None:
    """Say why `plan` cannot be used by `engine`, whose plans are `kind`.

    Engines of one group with the same number of experts and the same rows share their plans.
    """
    if not isinstance(plan, kind):
        return f"the plan is a {type(plan).__name__}: use the engine that made it"
    if plan.made_by is engine:
        return None
    if plan.made_by.group is not engine.group:
        return "the plan is for another process group: use the engine that made it"
    theirs, own = _rows_of(plan.made_by), _rows_of(engine)
    for name, value in own.items():
        if theirs[name] != value:
            return (
                f"the plan is for {name} {theirs[name]}, the engine for {value}: use the engine "
                "that made it"
            )
    return None


def _rows_of(engine: Any) -> dict[str, object]:
    """What decides how many rows a plan of `engine` has, by the names that errors give it."""
    config: EpConfig = engine.config
    return {
        "num_experts": engine.num_experts,
        "alignment": config.block_alignment,
        "max_recv_rows": config.max_recv_rows,
        "max_tokens_per_rank": config.max_tokens_per_rank,
    }
