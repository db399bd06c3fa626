"""What a subject of the benchmark is, what it is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import payload
from megatron_ncclep.benchmark.routes import Routes, routes_of
from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.errors import EpError
from megatron_ncclep.testing.cases import Case, refusal

# What a subject's passes are called, in the order in which they run.  bwd_dispatch is the backward
# of combine (a dispatch of gradients), bwd_combine the backward of dispatch.
STEPS = ("plan", "dispatch", "combine", "bwd_dispatch", "bwd_combine")
WHOLE = ("forward", "backward")
# Of a layer that is one CUDA graph.
BOTH = "forward+backward"
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

    # Pass -> a call that runs it once; STEPS or WHOLE, in order, or BOTH alone.
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
