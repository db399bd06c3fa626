"""The reference engine: torch.distributed, any device, any backend.  It defines the contract.

A worked example.  Two ranks, four experts (rank 0 has experts 0 and 1), top-2, alignment 1:

    rank 0: token 0 -> experts 0, 1      rank 1: token 0 -> experts 2, 1
            token 1 -> experts 3, 0

    pairs (source rank, token) for rank 0: (0, 0) (0, 1) (1, 0); the first has two assignments
    assignments for rank 0, as they arrive, by source rank, local expert and token:
        (0, e0, token 0) (0, e0, token 1) (0, e1, token 0) (1, e1, token 0)
    slots on rank 0, by local expert, source rank and token: e0: (0, 0) (0, 1)   e1: (0, 0) (1, 0)
    pairs of the four slots: 0, 1, 0, 2

Dispatch sends one row per pair and copies it to the slots of its assignments; combine adds the rows
of a pair's assignments and sends one row per pair back.  Weights are sent with the rows, one per
assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import (
    BYTES,
    COMMON_OPTIONS,
    NOT_ROUTED,
    SOURCE_PART_UNROUNDED,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.low_latency_types import LowLatencySizes
from megatron_ncclep.engines.plain_torch import plain_torch
from megatron_ncclep.engines.reference.low_latency import ReferenceLowLatency
from megatron_ncclep.errors import InputError
from megatron_ncclep.ranks.all_to_all import exchange_lists

MAX_ROWS = 2**31 - 1  # that one rank may receive: a row's number is an int32
CAPS = EngineCaps(
    name="reference",
    reduction=SOURCE_PART_UNROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    row_bytes_multiple=1,
    options=COMMON_OPTIONS,
    moves_bytes=True,
    low_latency_tokens=65536,
)


@dataclass(eq=False)
class ReferencePlan(RoutePlan):
    """Routes as index lists: at the source rank 'sent', at the expert rank 'received'.

    Attributes:
        sent_token: int32 [pairs sent]: the token of each (destination rank, token) pair.
        sent_assignment: int32 [assignments sent]: index token * top_k + k of each assignment, in
            the order (destination rank, local expert, token).
        row_pair: int32 [assignments kept]: the received pair of each row that is not padding.
        row_assignment: int32 [assignments kept]: the received assignment of each.
        blocks: for each local expert, its first row and the number of rows that are not padding.
        pairs_sent, assignments_sent: per destination rank.
        pairs_received, assignments_received: per source rank, including dropped ones.
        zero_unused: see `Engine.plan`.
    """

    sent_token: torch.Tensor
    sent_assignment: torch.Tensor
    row_pair: torch.Tensor
    row_assignment: torch.Tensor
    blocks: list[tuple[int, int]]
    pairs_sent: list[int]
    assignments_sent: list[int]
    pairs_received: list[int]
    assignments_received: list[int]
    zero_unused: bool


class ReferenceEngine(EngineBase[ReferencePlan]):
    """See `Engine`.  The hosts wait in every call: built for correctness, not for speed."""

    caps = CAPS
    plan_type = ReferencePlan

    @plain_torch
    def plan(self, topk_idx: torch.Tensor, zero_unused: bool = True) -> ReferencePlan:
        """See `Engine.plan`."""
        self.require_open()
        num_ranks, num_local = self.group.size, self.num_local_experts
        agreement = self.agree_on_routes(topk_idx, self.topk_problem(topk_idx))
        num_tokens, top_k = topk_idx.shape

        # Every rank learns all routes.
        rank, tokens_of = self.group.rank, agreement.gathered
        routes = torch.cat([topk_idx.int()] * num_ranks)
        (all_routes,) = self._exchange(
            [(routes, [num_tokens] * num_ranks, tokens_of)], "plan, exchanging routes"
        )
        self._check_row_counts(all_routes)
        assignments = _assignment_of_each(all_routes, self.num_experts)

        # At the source rank.
        first_token = sum(tokens_of[:rank])
        of_own_tokens = assignments[:, first_token : first_token + num_tokens]
        is_sent = of_own_tokens >= 0
        is_pair_sent = is_sent.view(num_ranks, num_local, num_tokens).any(dim=1)

        # At the expert rank: rows by local expert, and then in the order of the tokens.
        received = assignments[rank * num_local : (rank + 1) * num_local] >= 0
        is_pair = received.any(dim=0)
        pair = is_pair.cumsum(0) - 1
        by_source = torch.stack([part.sum(dim=1) for part in received.split(tokens_of, dim=1)])
        numbers = by_source.tolist()  # [source rank][local expert]
        row_assignment = self._rows_from_sources(numbers)
        limit = self.rows_limit(num_tokens, top_k)
        kept = received
        if limit is not None:
            kept = received & self._fits(received, limit)
            row_assignment = row_assignment[kept[received]]

        alignment, routed = self.config.block_alignment, kept.sum(dim=1).tolist()
        padded = [-(-rows // alignment) * alignment for rows in routed]
        num_dropped = sum(map(sum, numbers)) - sum(routed)
        return ReferencePlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            made_by=self,
            num_rows=sum(padded) if limit is None else limit,
            counts=torch.tensor([*padded, *routed, num_dropped], device=topk_idx.device),
            sent_token=is_pair_sent.nonzero()[:, 1].int(),
            sent_assignment=of_own_tokens[is_sent] - first_token * top_k,
            row_pair=pair[kept.nonzero()[:, 1]].int(),
            row_assignment=row_assignment.int(),
            blocks=list(zip(accumulate(padded, initial=0), routed, strict=False)),
            pairs_sent=is_pair_sent.sum(dim=1).tolist(),
            assignments_sent=is_sent.view(num_ranks, -1).sum(dim=1).tolist(),
            pairs_received=[int(part.sum()) for part in is_pair.split(tokens_of)],
            assignments_received=[sum(of_experts) for of_experts in numbers],
            zero_unused=zero_unused,
        )

    @plain_torch
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        sent = [(x.index_select(0, plan.sent_token), plan.pairs_sent, plan.pairs_received)]
        if w is not None:
            of_assignments = w.reshape(-1).index_select(0, plan.sent_assignment)
            sent.append((of_assignments, plan.assignments_sent, plan.assignments_received))
        received = self._exchange(sent, "dispatch")

        rows = _with_padding(plan, received[0].index_select(0, plan.row_pair))
        if w is None:
            return rows, None
        return rows, _with_padding(plan, received[1].index_select(0, plan.row_assignment))

    @plain_torch
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`.

        Sums are fp32 (fp64 for fp64 rows) and start from +0: on the expert rank over a pair's
        assignments in ascending local-expert order, rounded once for the wire; at the source rank
        over the ranks in ascending order, the source rank's own part unrounded, rounded once.
        """
        plan = self._agree("combine", plan, y, w)
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32

        partial = y.new_zeros(sum(plan.pairs_received), y.shape[1], dtype=wide)
        of_experts = plan.row_pair.long().split([number for _, number in plan.blocks])
        for rows, pair in zip(_without_padding(plan, y), of_experts, strict=True):
            partial.index_add_(0, pair, rows.to(wide))  # a pair has at most one row per expert

        sent = [(partial.to(y.dtype), plan.pairs_received, plan.pairs_sent)]
        if w is not None:
            of_rows = torch.cat(_without_padding(plan, w))
            of_assignments = _scattered(
                of_rows, plan.row_assignment, sum(plan.assignments_received)
            )
            sent.append((of_assignments, plan.assignments_received, plan.assignments_sent))
        returned = self._exchange(sent, "combine")

        parts = list(returned[0].split(plan.pairs_sent))
        parts[self.group.rank] = partial.split(plan.pairs_received)[self.group.rank]
        total = partial.new_zeros(plan.num_tokens, y.shape[1])
        for token, part in zip(plan.sent_token.long().split(plan.pairs_sent), parts, strict=True):
            total.index_add_(0, token, part.to(wide))
        out = total.to(y.dtype)
        if w is None:
            return out, None
        topk_w = _scattered(returned[1], plan.sent_assignment, plan.num_tokens * plan.top_k)
        return out, topk_w.view(plan.num_tokens, plan.top_k)

    def make_low_latency(self, sizes: LowLatencySizes, number: int) -> ReferenceLowLatency:
        """See `create_low_latency`."""
        self.require_open()
        return ReferenceLowLatency(self.group, self.num_experts, sizes, self.config)

    def _check_row_counts(self, all_routes: torch.Tensor) -> None:
        """Refuse more rows than row numbers allow; every rank knows all routes, so all raise."""
        if self.config.max_recv_rows is not None:
            return
        padding = self.num_local_experts * (self.config.block_alignment - 1)
        if all_routes.numel() + padding <= MAX_ROWS:
            return
        ranks = all_routes[all_routes != NOT_ROUTED] // self.num_local_experts
        for rank, assignments in enumerate(ranks.bincount(minlength=self.group.size).tolist()):
            rows = assignments + padding
            if rows > MAX_ROWS:
                raise InputError(
                    f"plan: rank {rank} would receive up to {rows} rows, more than the "
                    f"{MAX_ROWS} that a row number can name: use smaller micro-batches"
                )

    def _rows_from_sources(self, numbers: list[list[int]]) -> torch.Tensor:
        """The received assignment of each row, if all are kept: int64.

        They arrive in the order (source rank, local expert, token); the rows are in the order
        (local expert, source rank, token).

        Args:
            numbers: of assignments, by source rank and local expert.
        """
        lengths = [number for of_experts in numbers for number in of_experts]
        runs = torch.arange(sum(lengths), device=self.group.device).split(lengths)
        num_local = self.num_local_experts
        return torch.cat([run for expert in range(num_local) for run in runs[expert::num_local]])

    def _fits(self, received: torch.Tensor, limit: int) -> torch.Tensor:
        """Which of the assignments bool [local experts, tokens] fit into `limit` rows.

        An assignment that opens an alignment block of `alignment` rows needs all of it; everything
        after the first assignment that does not fit is dropped too, so the order decides, not
        chance.
        """
        opens_block = received & ((received.cumsum(1) - 1) % self.config.block_alignment == 0)
        rows = opens_block.T.flatten().cumsum(0) * self.config.block_alignment
        if self._overflow_report is not None:
            mine = rows[-1:].sum().reshape(1)  # 0 without tokens
            what = "plan, exchanging the number of rows that each rank needs"
            needed = self.group.hosts.gather(mine, what, self.timeout_s).flatten()
            self._overflow_report.record(needed, limit)
        return (rows <= limit).view_as(received.T).T

    def _exchange(
        self, lists: list[tuple[torch.Tensor, list[int], list[int]]], what: str
    ) -> list[torch.Tensor]:
        return exchange_lists(self.group, lists, what, self.timeout_s)


def _assignment_of_each(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The assignment with which each token names each expert; -1: the token does not name it.

    Returns:
        int32 [num_experts, num_tokens], numbers token * top_k + k.
    """
    num_tokens, top_k = topk_idx.shape
    numbers = torch.arange(num_tokens * top_k, dtype=torch.int32, device=topk_idx.device)
    table = numbers.new_full((num_experts + 1, num_tokens), -1)
    # The last row, which is cut off, collects unrouted assignments: -1 modulo num_experts + 1.
    expert = topk_idx.long() % (num_experts + 1)
    return table.scatter_(0, expert.T, numbers.view(num_tokens, top_k).T)[:-1]


def _scattered(values: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
    """A tensor of `length` entries with `values` at `places`, which are distinct, else zeros."""
    everything = values.new_zeros(length, *values.shape[1:])
    return everything.index_copy_(0, places.long(), values)


def _with_padding(plan: ReferencePlan, values: torch.Tensor) -> torch.Tensor:
    """`values` of the rows that are not padding, and zeros for those that are."""
    if len(values) == plan.num_rows:
        return values
    rows = values.new_zeros(plan.num_rows, *values.shape[1:])
    numbers = [number for _, number in plan.blocks]
    for (first, number), of_expert in zip(plan.blocks, values.split(numbers), strict=True):
        rows[first : first + number] = of_expert
    if values.dim() > 1 and not plan.zero_unused:  # nobody may read them: make mistakes show
        rows[int(plan.tokens_per_expert.sum()) :] = -1 if values.dtype == BYTES else torch.nan
    return rows


def _without_padding(plan: ReferencePlan, rows: torch.Tensor) -> list[torch.Tensor]:
    """For each local expert, its rows that are not padding."""
    return [rows[first : first + number] for first, number in plan.blocks]
