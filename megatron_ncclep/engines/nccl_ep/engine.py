"""The engine on NVIDIA's NCCL EP: HT-mode kernels of libnccl_ep.so, through its C interface.

The library fixes the number of tokens of a rank and the length of a row when it makes a group.
Neither is known when an engine is made, so the staging memory is made at the first dispatch, and
made again, on all ranks together, when a larger batch or a longer row arrives (staging.py).

The number of rows that each rank receives is computed here, from the counts of assignments that the
ranks exchange, so that a plan can exist before the length of its rows is known.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import (
    BYTES,
    COMMON_OPTIONS,
    EVERY_PART_ROUNDED,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.nccl_ep.staging import MAX_TOKENS, NcclEpPlan, Route, Staging
from megatron_ncclep.engines.overflow import (
    assignments_of_experts,
    can_drop,
    drop_what_does_not_fit,
    rows_needed,
)
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.group import EpGroup

CAPS = EngineCaps(
    name="nccl_ep",
    reduction=EVERY_PART_ROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=COMMON_OPTIONS | {"num_sms"},
    moves_bytes=True,
    max_tokens=MAX_TOKENS,
    max_top_k=32,
    max_local_experts=256,
    min_ranks=2,
)


class NcclEpEngine(EngineBase[NcclEpPlan]):
    """See `Engine`.  Ranks agree on the host before every call, while the device works."""

    caps = CAPS
    plan_type = NcclEpPlan

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; opens the library and makes the group's communicator, if need be."""
        self._staging_name = Staging.name(num_experts, config)
        self._staging: Staging = group.resources.share(
            self._staging_name, lambda: Staging(group, num_experts, config)
        )
        self._row_bytes = 0  # of the longest row so far
        super().__init__(group, num_experts, config)

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor, zero_unused: bool = True) -> NcclEpPlan:
        """See `Engine.plan`."""
        self.require_open()
        agreement = self.agree_on_routes(topk_idx, self.topk_problem(topk_idx))
        self._staging.free_unused()
        topk_idx = topk_idx.to(torch.int64, copy=True).contiguous()  # the plan's own
        counts = self._exchange_counts(topk_idx)
        alignment = self.config.block_alignment
        num_tokens, top_k = topk_idx.shape
        limit = self.rows_limit(num_tokens, top_k)
        requested = self._local(counts)
        if limit is not None and can_drop(self.config):
            if self._overflow_report is not None:
                self._overflow_report.record(rows_needed(counts, alignment), limit)
            topk_idx = drop_what_does_not_fit(topk_idx, counts, self.group.rank, alignment, limit)
            counts = self._exchange_counts(topk_idx)
        order = None
        if self._staging.adds_by_assignment:  # but the contract's order is that of the ranks
            topk_idx, order = topk_idx.sort(dim=1)
        routed = self._local(counts)
        padded = (routed + alignment - 1) // alignment * alignment
        num_used = int(padded.sum())
        num_dropped = (requested - routed).sum().view(1)
        plan = NcclEpPlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            made_by=self,
            num_rows=num_used if limit is None else limit,
            counts=torch.cat([padded, routed, num_dropped]).to(self.group.device),
            topk_idx=topk_idx,
            order=order,
            host_counts=padded,
            num_used=num_used,
            num_staged_tokens=max(self.declared_tokens, *agreement.gathered),
            route=Route(),
        )
        if self._row_bytes:  # the layer has moved rows before: the library can plan now
            self._staging.bind(plan, self._row_bytes, alignment)
        return plan

    @torch.no_grad()
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        dtype = x.dtype
        if dtype == BYTES:  # the library has no byte dtype but only copies, so bytes travel as bf16
            x = x.contiguous().view(torch.bfloat16)
        handle = self._bind(plan, x)
        num_rows = self._staging.rows_of(plan)
        rows = x.new_empty(num_rows, x.shape[1])
        row_w = None if w is None else w.new_empty(num_rows)
        if w is not None:
            w = w.contiguous() if plan.order is None else w.gather(1, plan.order)
        handle.dispatch(
            x.contiguous(),
            w,
            rows,
            row_w,
            extension.current_stream(),
        )
        if plan.num_used < num_rows:
            rows[plan.num_used :].zero_()
            if row_w is not None:
                row_w[plan.num_used :].zero_()
        rows = rows[: plan.num_rows].view(dtype)
        return rows, None if row_w is None else row_w[: plan.num_rows]

    @torch.no_grad()
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`."""
        plan = self._agree("combine", plan, y, w)
        handle = self._bind(plan, y)
        missing = self._staging.rows_of(plan) - plan.num_rows
        if missing:  # the library insists on its own number of rows
            y = torch.cat([y, y.new_zeros(missing, y.shape[1])])
            w = None if w is None else torch.cat([w, w.new_zeros(missing)])
        out = y.new_empty(plan.num_tokens, y.shape[1])
        topk_w = None if w is None else w.new_empty(plan.num_tokens, plan.top_k)
        handle.combine(
            y.contiguous(),
            None if w is None else w.contiguous(),
            out,
            topk_w,
            extension.current_stream(),
        )
        if topk_w is not None and plan.order is not None:
            topk_w = torch.empty_like(topk_w).scatter_(1, plan.order, topk_w)
        return out, topk_w

    def _release(self) -> None:
        """Release the staging memory, which the group's last engine frees."""
        self.group.resources.release(self._staging_name, self.timeout_s)

    def _bind(self, plan: NcclEpPlan, rows: torch.Tensor) -> Any:
        """Return the library's handle of `plan`, for rows as long as those of `rows`."""
        row_bytes = rows.shape[1] * rows.element_size()
        self._row_bytes = max(self._row_bytes, row_bytes)
        return self._staging.bind(plan, row_bytes, self.config.block_alignment)

    def _exchange_counts(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Assignments of every rank for every expert, int64 [num_ranks, num_experts] on the CPU."""
        mine = assignments_of_experts(topk_idx, self.num_experts)
        return self.group.hosts.gather(mine.cpu(), "plan, exchanging counts", self.timeout_s)

    def _local(self, counts: torch.Tensor) -> torch.Tensor:
        """Assignments of all ranks for each expert of this rank."""
        first = self.group.rank * self.num_local_experts
        return counts[:, first : first + self.num_local_experts].sum(dim=0)
