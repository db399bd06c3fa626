"""Subjects: everything that can be measured, by name.

    ENGINE                 an engine of this package through the engine interface
    nccl_ep_library        NVIDIA's libnccl_ep called directly, without this package's checks
    alltoall, allgather,   Megatron-Core's own dispatchers through their six hooks
    flex_deepep, ...
    ncclep:ENGINE          this package's dispatcher through the same hooks
    layer:DISPATCHER       a whole MoELayer (router, dispatcher, experts) with any of those through
                           hooks, such as layer:alltoall and layer:ncclep:native

`ENGINE@N` and `nccl_ep_library@N` let the kernels have N SMs.  Layers are measured only when they
are asked for: their experts take as much memory and time as in training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import payload
from megatron_ncclep.benchmark.routes import Routes, routes_of
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.errors import EpError, InputError
from megatron_ncclep.testing.cases import Case, refusal

LIBRARY = "nccl_ep_library"
# Yardsticks of Megatron-Core: our name -> dispatcher type and further TransformerConfig fields.
MEGATRON: dict[str, tuple[str, dict[str, Any]]] = {
    "alltoall": ("alltoall", {}),
    "alltoall_fused": ("alltoall", {"moe_permute_fusion": True}),
    "allgather": ("allgather", {}),
    "flex_deepep": ("flex", {"moe_flex_dispatcher_backend": "deepep"}),
    "flex_hybridep": ("flex", {"moe_flex_dispatcher_backend": "hybridep"}),
    "flex_ncclep": ("flex", {"moe_flex_dispatcher_backend": "ncclep"}),
}
OUR_DISPATCHER = "ncclep:"
LAYER = "layer:"

# What a subject's passes are called, in the order in which they run.  bwd_dispatch is the backward
# of combine (a dispatch of gradients), bwd_combine the backward of dispatch.
STEPS = ("plan", "dispatch", "combine", "bwd_dispatch", "bwd_combine")
WHOLE = ("forward", "backward")
# Kinds of subjects that have these two passes, and whose host time counts.
LAUNCHED = ("megatron", "layer")


class UnavailableError(EpError):
    """A subject cannot be measured here; says why."""


@dataclass(frozen=True)
class Setting:
    """Where subjects run: the same on every rank but for `rank`.

    Attributes:
        rank, num_ranks: of this process in the group that is measured.
        device: "cpu" or "cuda".
        timeout_s: seconds that a rank waits for the others.
        new_group: makes a process group of the same ranks with that deadline.  Collective.
    """

    rank: int
    num_ranks: int
    device: str
    timeout_s: float
    new_group: Callable[[], dist.ProcessGroup]


@dataclass(frozen=True)
class Workload:
    """One shape's routing and payload on this rank, shared by all subjects, which only read them.

    Attributes:
        case: the shape.
        routes: of the whole group.
        topk_idx: int64 [T, K].
        x, grad_out: [T, H].
        w: fp32 [T, K].
        y, grad_rows: [N, H].
        grad_row_w: fp32 [N].
        ffn_hidden_size: of one expert; None: the shape does not say.
        shared: what subjects made for each other, by name, as long as one of them holds it.
    """

    case: Case
    routes: Routes
    topk_idx: torch.Tensor
    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
    grad_out: torch.Tensor
    grad_rows: torch.Tensor
    grad_row_w: torch.Tensor
    ffn_hidden_size: int | None = None
    shared: WeakValueDictionary[str, Any] = field(default_factory=WeakValueDictionary)


def make_workload(case: Case, rank: int, ffn_hidden_size: int | None = None) -> Workload:
    """Make the workload of `rank`; needs no communication."""
    every = [case.topk_idx(r) for r in range(case.num_ranks)]
    routes = routes_of(every, case.num_experts, case.alignment)
    num_tokens, num_rows = case.tokens[rank], routes.num_rows(rank)

    def make(kind: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        row = torch.arange(length, device=case.device)
        return payload.rows(kind, torch.full_like(row, rank), row, width, dtype)

    return Workload(
        case=case,
        routes=routes,
        topk_idx=every[rank],
        x=make(payload.X, num_tokens, case.hidden, case.dtype),
        w=make(payload.WEIGHTS, num_tokens, case.top_k, torch.float32),
        y=make(payload.Y, num_rows, case.hidden, case.dtype),
        grad_out=make(payload.GRAD_OUT, num_tokens, case.hidden, case.dtype),
        grad_rows=make(payload.GRAD_ROWS, num_rows, case.hidden, case.dtype),
        grad_row_w=make(payload.GRAD_WEIGHTS, num_rows, 1, torch.float32).squeeze(1),
        ffn_hidden_size=ffn_hidden_size,
    )


class Prepared(Protocol):
    """A subject that is ready to be measured with one workload; every method is collective."""

    # Pass -> a call that runs it once; STEPS or WHOLE, in order.
    passes: dict[str, Callable[[], Any]]
    # SMs that its kernels use, in words.
    sms: str
    # Memory of torch's that it uses and a subject before it had made.
    shared_bytes: int

    def problem(self) -> str | None:
        """Run every pass and say what is wrong with the results on this rank, if anything is."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class Subject(Protocol):
    """One thing to measure.

    Attributes:
        name: as on the command line.
        kind: "engine", "library", "megatron" or "layer".
        checked: what `Prepared.problem` compares, in words.
    """

    name: str
    kind: str
    checked: str

    def prepare(self, setting: Setting, workload: Workload) -> Prepared:
        """Make it ready.  Collective.

        Raises:
            UnavailableError: it cannot be measured here; raised on every rank that knows.
        """
        ...


def limits_problem(case: Case, caps: EngineCaps) -> str | None:
    """Say which limit of an engine the case does not keep, if any."""
    limit = refusal(case, caps)
    if limit is None:
        return None
    return f"the shape is beyond what {caps.name} takes: {limit} {getattr(caps, limit)}"


def default_names() -> list[str]:
    """The names of what is measured unless something is asked for, in the order of the table."""
    return [*ENGINES, LIBRARY, *_dispatcher_names()]


def known_names() -> list[str]:
    """The names of all subjects."""
    return [*default_names(), *(LAYER + name for name in _dispatcher_names())]


def _dispatcher_names() -> list[str]:
    return [*(OUR_DISPATCHER + engine for engine in ENGINES), *MEGATRON]


def make_subject(name: str) -> Subject:
    """Make the subject that `name` means.

    Raises:
        InputError: unknown, or a number of SMs for something that has no such option.
    """
    from megatron_ncclep.benchmark.engine_subject import EngineSubject
    from megatron_ncclep.benchmark.layer_subject import LayerSubject
    from megatron_ncclep.benchmark.library_subject import LibrarySubject
    from megatron_ncclep.benchmark.megatron_setup import DispatcherChoice
    from megatron_ncclep.benchmark.megatron_subject import MegatronSubject

    base, num_sms = split_name(name)
    if base in ENGINES:
        return EngineSubject(name, base, num_sms)
    if base == LIBRARY:
        return LibrarySubject(name, num_sms)
    dispatcher = base.removeprefix(LAYER)
    if dispatcher.startswith(OUR_DISPATCHER):
        choice = DispatcherChoice("ncclep", {}, dispatcher.removeprefix(OUR_DISPATCHER))
    else:
        choice = DispatcherChoice(*MEGATRON[dispatcher])
    return LayerSubject(name, choice) if base != dispatcher else MegatronSubject(name, choice)


def split_name(name: str) -> tuple[str, int | None]:
    """Split `BASE@N` into BASE and N, without making anything.

    Raises:
        InputError: unknown, or a number of SMs for something that has no such option.
    """
    base, at, sms = name.partition("@")
    if base not in known_names():
        raise InputError(f"unknown subject {name!r}: there are {', '.join(known_names())}")
    if not at:
        return base, None
    if not re.fullmatch("[1-9][0-9]*", sms):
        raise InputError(f"subject {name!r}: write a number of SMs after the @, such as {base}@24")
    if base != LIBRARY and (base not in ENGINES or "num_sms" not in ENGINES[base].caps.options):
        raise InputError(f"subject {name!r}: {base} would ignore a number of SMs: leave @{sms} out")
    return base, int(sms)
