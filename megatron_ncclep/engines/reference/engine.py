"""The reference engine: torch.distributed, any device, any backend.  The meaning of the contract.

A worked example.  Two ranks, four experts (rank 0 has experts 0 and 1), top-2, alignment 1:

    rank 0: token 0 -> experts 0, 1      rank 1: token 0 -> experts 2, 1
            token 1 -> experts 3, 0

    assignments for rank 0, in the order (source rank, token, local expert):
        (0, token 0, e0) (0, token 0, e1) (0, token 1, e0) (1, token 0, e1)
    pairs (source rank, token) for rank 0: (0, 0) (0, 1) (1, 0); the first has two assignments
    slots on rank 0, expert-major: e0: (0, 0) (0, 1)   e1: (0, 0) (1, 0)
    slots of the four assignments: 0, 2, 1, 3

Dispatch sends one row per pair and copies it to the slots of its assignments; combine adds the rows
of a pair's assignments and sends one row per pair back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import (
    BY_RAIL,
    BY_RANK,
    COMMON_OPTIONS,
    NODE_SUMS_ROUNDED,
    NOT_ROUTED,
    REDUCTIONS,
    SOURCE_PART_UNROUNDED,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.low_latency_types import LowLatencySizes
from megatron_ncclep.engines.reference.low_latency import ReferenceLowLatency
from megatron_ncclep.errors import InputError
from megatron_ncclep.ranks.all_to_all import exchange
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes

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
    """Routes as index lists. 'Sent' is the source rank's side, 'received' the expert rank's.

    Attributes:
        sent_token: int32 [pairs sent]: the token of each (destination rank, token) pair.
        sent_assignment: int32 [assignments sent]: index token * top_k + k of each assignment, in
            the order (destination rank, token, expert).
        assignment_pair: int32 [assignments received]: the received pair of each assignment.
        assignment_turn: int32 [assignments received]: the assignment's place among its pair's, by
            local expert.
        assignment_slot: int32 [assignments received]: the row it goes to; -1 when it was dropped.
        pairs_sent, assignments_sent: per destination rank.
        pairs_received, assignments_received: per source rank.
    """

    sent_token: torch.Tensor
    sent_assignment: torch.Tensor
    assignment_pair: torch.Tensor
    assignment_turn: torch.Tensor
    assignment_slot: torch.Tensor
    pairs_sent: list[int]
    assignments_sent: list[int]
    pairs_received: list[int]
    assignments_received: list[int]


class ReferenceEngine(EngineBase[ReferencePlan]):
    """See `Engine`.  The hosts wait in every call: built for correctness, not for speed.

    Args:
        reduction: how combine rounds; one other than the contract's is for comparison with an
            engine that declares it.
        nodes: the grid, for comparison with an engine whose slots are in the order BY_RAIL.
            NODE_SUMS_ROUNDED needs it.
    """

    plan_type = ReferencePlan

    def __init__(
        self,
        group: EpGroup,
        num_experts: int,
        config: EpConfig,
        reduction: str = SOURCE_PART_UNROUNDED,
        nodes: Nodes | None = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise InputError(f"reduction {reduction!r}: must be one of {REDUCTIONS}")
        if reduction == NODE_SUMS_ROUNDED and nodes is None:
            raise InputError(f"reduction {reduction!r}: needs to know the nodes")
        slot_order = BY_RANK if nodes is None else BY_RAIL
        self.caps = dataclasses.replace(CAPS, reduction=reduction, slot_order=slot_order)
        self._nodes = nodes
        super().__init__(group, num_experts, config)

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor) -> ReferencePlan:
        """See `Engine.plan`."""
        self._require_open()
        num_ranks, num_local = self.group.size, self.num_local_experts
        agreement = self.agree_on_routes(topk_idx, self.topk_problem(topk_idx))
        num_tokens, top_k = topk_idx.shape

        # At the source rank: the assignments in the order (destination rank, token, expert), and
        # their pairs.
        flat = topk_idx.reshape(-1).long()
        assignment = (flat != NOT_ROUTED).nonzero().squeeze(1)
        token, expert = assignment // top_k, flat[assignment]
        pair_key = (expert // num_local) * num_tokens + token
        order = (pair_key * self.num_experts + expert).argsort()
        assignment, expert, pair_key = assignment[order], expert[order], pair_key[order]
        sent_pair, pair_of_assignment = pair_key.unique_consecutive(return_inverse=True)
        pairs_sent = (sent_pair // max(num_tokens, 1)).bincount(minlength=num_ranks)
        assignments_sent = (expert // num_local).bincount(minlength=num_ranks)

        # Tell everybody who sends how many pairs and assignments to whom; then, which assignment is
        # whose.
        counts = self.group.gather(
            torch.stack([pairs_sent, assignments_sent]).reshape(-1).cpu(),
            "plan, exchanging counts",
            self.timeout_s,
        ).view(num_ranks, 2, num_ranks)  # [source, pairs or assignments, destination]
        self._check_row_counts(counts[:, 1].sum(dim=0).tolist())
        pairs_received = counts[:, 0, self.group.rank]
        assignments_received = counts[:, 1, self.group.rank]
        first_sent = pairs_sent.cumsum(0) - pairs_sent
        assignments = self._exchange(
            torch.stack(
                [pair_of_assignment - first_sent[expert // num_local], expert % num_local], dim=1
            ),
            assignments_sent.tolist(),
            assignments_received.tolist(),
            "plan, exchanging assignments",
        )
        # They arrive in the order (source rank, token, local expert).
        first_received = (pairs_received.cumsum(0) - pairs_received).repeat_interleave(
            assignments_received
        )
        assignment_pair = assignments[:, 0] + first_received.to(assignments.device)
        slots = self._slots(assignments[:, 1], assignments_received, num_tokens, top_k)

        _, assignments_of_pair = assignment_pair.unique_consecutive(return_counts=True)
        first_assignment = (assignments_of_pair.cumsum(0) - assignments_of_pair).repeat_interleave(
            assignments_of_pair
        )
        return ReferencePlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            num_rows=slots.num_rows,
            counts=slots.counts,
            sent_token=(sent_pair % max(num_tokens, 1)).int(),
            sent_assignment=assignment.int(),
            assignment_pair=assignment_pair.int(),
            assignment_turn=(
                torch.arange(len(assignment_pair), device=assignment_pair.device) - first_assignment
            ).int(),
            assignment_slot=slots.slot.int(),
            pairs_sent=pairs_sent.tolist(),
            assignments_sent=assignments_sent.tolist(),
            pairs_received=pairs_received.tolist(),
            assignments_received=assignments_received.tolist(),
        )

    @torch.no_grad()
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        kept = plan.assignment_slot >= 0
        slot = plan.assignment_slot[kept]

        received = self._exchange(
            x[plan.sent_token], plan.pairs_sent, plan.pairs_received, "dispatch"
        )
        rows = x.new_zeros(plan.num_rows, x.shape[1])
        rows[slot] = received[plan.assignment_pair[kept]]
        if w is None:
            return rows, None

        received_w = self._exchange(
            w.reshape(-1)[plan.sent_assignment],
            plan.assignments_sent,
            plan.assignments_received,
            "dispatch, weights",
        )
        row_w = w.new_zeros(plan.num_rows)
        row_w[slot] = received_w[kept]
        return rows, row_w

    @torch.no_grad()
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`.

        Sums are fp32 (fp64 for fp64 rows) and start from +0: on the expert rank over a pair's
        assignments in ascending local-expert order, rounded once for the wire; at the source rank
        over the ranks in ascending order, the source rank's own part unrounded (unless the engine
        was made with another reduction), rounded once.
        """
        plan = self._agree("combine", plan, y, w)
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        kept = plan.assignment_slot >= 0

        partial = y.new_zeros(sum(plan.pairs_received), y.shape[1], dtype=wide)
        for turn in range(int(plan.assignment_turn.max()) + 1 if len(plan.assignment_turn) else 0):
            now = kept & (plan.assignment_turn == turn)  # at most one assignment of each pair
            partial[plan.assignment_pair[now]] += y[plan.assignment_slot[now]].to(wide)

        out = self._add_up(plan, partial, y.dtype)
        if w is None:
            return out.to(y.dtype), None

        assignment_w = torch.where(kept, w[plan.assignment_slot.clamp(min=0)], 0) if len(w) else w
        returned_w = self._exchange(
            assignment_w, plan.assignments_received, plan.assignments_sent, "combine, weights"
        )
        topk_w = w.new_zeros(plan.num_tokens * plan.top_k)
        topk_w[plan.sent_assignment] = returned_w
        return out.to(y.dtype), topk_w.view(plan.num_tokens, plan.top_k)

    def _add_up(
        self, plan: ReferencePlan, partial: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Send the pairs' sums `partial` back and add them up: [num_tokens, hidden]."""
        rank, nodes = self.group.rank, self._nodes
        by_node = self.caps.reduction == NODE_SUMS_ROUNDED
        # The part that is not rounded may come from another rank: then the source rank does the
        # rounding.
        sent = partial if by_node else partial.to(dtype)
        returned = self._exchange(sent, plan.pairs_received, plan.pairs_sent, "combine")
        parts = list(returned.split(plan.pairs_sent))
        parts[rank] = partial.split(plan.pairs_received)[rank]
        tokens = plan.sent_token.split(plan.pairs_sent)

        def rounded(rows: torch.Tensor) -> torch.Tensor:
            return rows.to(dtype).to(partial.dtype)

        exact = [rank] if self.caps.reduction == SOURCE_PART_UNROUNDED else []
        together = [list(range(self.group.size))]
        if by_node and nodes is not None:
            exact = nodes.rail_of(rank)
            together = [nodes.ranks_of(node) for node in range(nodes.count)]
        out = partial.new_zeros(plan.num_tokens, partial.shape[1])
        for ranks in together:
            total = torch.zeros_like(out)
            for other in ranks:
                total[tokens[other]] += parts[other] if other in exact else rounded(parts[other])
            out += rounded(total) if by_node else total
        return out

    def make_low_latency(self, sizes: LowLatencySizes, number: int) -> ReferenceLowLatency:
        """See `create_low_latency`."""
        self._require_open()
        return ReferenceLowLatency(self.group, self.num_experts, sizes, self.config)

    def _check_row_counts(self, assignments_per_rank: list[int]) -> None:
        """Refuse more rows than row numbers can name; every rank knows all counts, so all raise."""
        for rank, assignments in enumerate(assignments_per_rank):
            rows = assignments + self.num_local_experts * (self.config.block_alignment - 1)
            if self.config.max_recv_rows is None and rows > self.caps.max_rows:
                raise InputError(
                    f"plan: rank {rank} would receive up to {rows} rows, more than the "
                    f"{self.caps.max_rows} that a row number can name: use smaller micro-batches"
                )

    def _slots(
        self, local_expert: torch.Tensor, by_source: torch.Tensor, num_tokens: int, top_k: int
    ) -> _Slots:
        """Give received assignments, `by_source` of them from each rank, expert-major slots."""
        if self._nodes is None:
            return self._slots_in_order(local_expert, num_tokens, top_k)
        assignments = torch.arange(len(local_expert), device=local_expert.device)
        from_rank = assignments.split(by_source.tolist())
        order = torch.cat([from_rank[rank] for rank in self._nodes.ranks_by_rail()])
        slots = self._slots_in_order(local_expert[order], num_tokens, top_k)
        slot = torch.empty_like(slots.slot)
        slot[order] = slots.slot
        return dataclasses.replace(slots, slot=slot)

    def _slots_in_order(self, local_expert: torch.Tensor, num_tokens: int, top_k: int) -> _Slots:
        """Give assignments that are already in slot order their expert-major slots."""
        alignment, num_local = self.config.block_alignment, self.num_local_experts
        limit = self.rows_limit(num_tokens, top_k)
        by_expert = local_expert.argsort(stable=True)
        wanted = local_expert.bincount(minlength=num_local)
        place = torch.empty_like(local_expert)  # of an assignment in its expert's block
        place[by_expert] = torch.arange(len(place), device=place.device) - (
            wanted.cumsum(0) - wanted
        ).repeat_interleave(wanted)

        kept = torch.ones_like(local_expert, dtype=torch.bool)
        if limit is not None:
            # An assignment that opens an alignment block of `alignment` rows needs all of it;
            # everything after the first assignment that does not fit is dropped too, so that the
            # order decides and not chance.
            rows = (place % alignment == 0).long().cumsum(0) * alignment
            kept = rows <= limit
            if self._shortage is not None:
                self._shortage.record(self._needed(rows), limit)
        routed = local_expert[kept].bincount(minlength=num_local)
        padded = (routed + alignment - 1) // alignment * alignment
        num_rows = int(padded.sum()) if limit is None else limit
        slot = (padded.cumsum(0) - padded)[local_expert] + place
        slot = torch.where(kept, slot, -1)
        return _Slots(slot, num_rows, torch.cat([padded, routed, (~kept).sum().view(1)]))

    def _needed(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that each rank needs, int64 [num_ranks]; `rows`: up to each assignment here."""
        mine = rows[-1:].sum().reshape(1)  # 0 without assignments
        what = "plan, exchanging how many rows each rank needs"
        return self.group.gather(mine, what, self.timeout_s).flatten()

    def _exchange(
        self, sent: torch.Tensor, sent_splits: list[int], received_splits: list[int], what: str
    ) -> torch.Tensor:
        return exchange(self.group, sent, sent_splits, received_splits, what, self.timeout_s)


@dataclass(frozen=True)
class _Slots:
    """The result of `_slots`: `slot` is -1 for a dropped assignment, `counts` a plan's."""

    slot: torch.Tensor
    num_rows: int
    counts: torch.Tensor
