"""The memory of the native engine's calls, and what happens when it runs out.

Each call makes one of these objects.  They are not frozen: that would take three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_ncclep.engines.native.plan import NativePlan, PlanCapacity

if TYPE_CHECKING:
    from megatron_ncclep import _C

_Memory = TypeVar("_Memory")


def try_allocate(what: str, allocate: Callable[..., _Memory], *arguments: Any) -> _Memory | str:
    """Allocate memory for `what` with `allocate(*arguments)`.

    Returns:
        the memory; or why there is none, which a rank first tells the other ranks.
    """
    try:
        return allocate(*arguments)
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        return f"no GPU memory for {what}: {reason}; use smaller micro-batches"


@dataclass(eq=False, slots=True)
class PlanBuffers:
    """A plan's memory.

    Attributes:
        counts: int64 [2 * num_local_experts + 1].
        token_routes: int32 [native.num_token_routes, num_tokens].
        kept: int32 [num_tokens, top_k], the assignments kept; None if nothing can be dropped.
        routes: int32, for the routes that arrive.
    """

    counts: torch.Tensor
    token_routes: torch.Tensor
    kept: torch.Tensor | None
    routes: torch.Tensor

    @classmethod
    def allocate(
        cls, native: _C.GroupHandle, capacity: PlanCapacity, topk_idx: torch.Tensor, may_drop: bool
    ) -> PlanBuffers:
        """Allocate on the device of `topk_idx`, [num_tokens, top_k].

        Raises:
            torch.OutOfMemoryError: there is no memory.
        """
        (num_tokens, top_k), device = topk_idx.shape, topk_idx.device
        size = native.routes_size(
            capacity.max_pairs, capacity.max_assignments, capacity.most_tokens
        )
        num_counts = 2 * capacity.num_local_experts + 1
        counts = torch.empty(num_counts, dtype=torch.int64, device=device)
        rows = native.num_token_routes
        token_routes = torch.empty(rows, num_tokens, dtype=torch.int32, device=device)
        kept = None
        if may_drop:
            kept = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
        routes = torch.empty(size, dtype=torch.int32, device=device)
        return cls(counts, token_routes, kept, routes)


@dataclass(eq=False, slots=True)
class RowsCall:
    """A dispatch or combine that can be queued: results, and inputs as the kernels read them.

    Attributes:
        plan: with its own type.
        tokens, topk_w: at the tokens' source rank, [num_tokens, hidden] and [num_tokens, top_k];
            dispatch reads them and combine writes them.
        rows, row_w: at the experts, [num_rows, hidden] and [num_rows]; the reverse.
        sums: scratch of a combine, [num_sums, hidden]; None if num_sums is 0.
        stream: handle of the current stream; 0 until everything else is known.
    """

    plan: NativePlan
    tokens: torch.Tensor
    topk_w: torch.Tensor | None
    rows: torch.Tensor
    row_w: torch.Tensor | None
    sums: torch.Tensor | None = None
    stream: int = 0

    @classmethod
    def of_dispatch(cls, plan: NativePlan, x: torch.Tensor, w: torch.Tensor | None) -> RowsCall:
        """Allocate for the arguments of dispatch; raises torch.OutOfMemoryError."""
        rows = x.new_empty(plan.num_rows, x.shape[1])
        if w is None:
            return cls(plan, aligned(x), None, rows, None)
        return cls(plan, aligned(x), w.contiguous(), rows, w.new_empty(plan.num_rows))

    @classmethod
    def of_combine(
        cls, plan: NativePlan, y: torch.Tensor, w: torch.Tensor | None, num_sums: int
    ) -> RowsCall:
        """Allocate for the arguments of combine; raises torch.OutOfMemoryError."""
        hidden = y.shape[1]
        tokens = y.new_empty(plan.num_tokens, hidden)
        sums = y.new_empty(num_sums, hidden) if num_sums else None
        if w is None:
            return cls(plan, tokens, None, aligned(y), None, sums)
        topk_w = w.new_empty(plan.num_tokens, plan.top_k)
        return cls(plan, tokens, topk_w, aligned(y), w.contiguous(), sums)

    def arguments(self, num_sms: int) -> dict[str, Any]:
        """Those of `_C.GroupHandle.dispatch` and `combine`."""
        return {
            "plan": self.plan.handle,
            "tokens": self.tokens,
            "topk_w": self.topk_w,
            "rows": self.rows,
            "row_w": self.row_w,
            "sums": self.sums,
            "num_sms": num_sms,
            "stream": self.stream,
        }


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as the kernels read them: contiguous and aligned to 16 bytes."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def row_bytes_of(rows: torch.Tensor) -> int:
    """Bytes of a row of [num_rows, hidden]."""
    return rows.shape[1] * rows.element_size()
