"""The reference engine: torch.distributed, any device, any backend.  The meaning of the contract.

A worked example.  Two ranks, four experts (rank 0 has experts 0 and 1), top-2, alignment 1:

    rank 0: token 0 -> experts 0, 1      rank 1: token 0 -> experts 2, 1
            token 1 -> experts 3, 0

    picks for rank 0, in the order (source rank, token, local expert):
        (0, token 0, e0) (0, token 0, e1) (0, token 1, e0) (1, token 0, e1)
    pairs (source rank, token) for rank 0: (0, 0) (0, 1) (1, 0); the first has two picks
    slots on rank 0, expert-major: e0: (0, 0) (0, 1)   e1: (0, 0) (1, 0)
    slots of the four picks: 0, 2, 1, 3

Dispatch sends one row per pair and copies it to the slots of its picks; combine adds the rows of a
pair's picks and sends one row per pair back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.agreement import agree_on_routes, agree_on_rows
from megatron_ncclep.engines.all_to_all import exchange, exchange_rows
from megatron_ncclep.engines.engine import (
    BY_RAIL,
    BY_RANK,
    HOME_PART_UNROUNDED,
    MACHINE_SUMS_ROUNDED,
    NOT_ROUTED,
    REDUCTIONS,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.low_latency import LowLatencySizes
from megatron_ncclep.engines.machines import Machines
from megatron_ncclep.engines.overflow_report import Shortage
from megatron_ncclep.engines.reference_low_latency import ReferenceLowLatency
from megatron_ncclep.engines.rows_limit import rows_limit
from megatron_ncclep.errors import GroupClosedError, InputError

CAPS = EngineCaps(
    name="reference",
    reduction=HOME_PART_UNROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    row_bytes_multiple=1,
    options=frozenset({"alignment", "check_calls", "max_recv_rows", "on_overflow", "timeout_s"}),
    moves_bytes=True,
    low_latency_tokens=65536,
)


@dataclass(frozen=True)
class ReferencePlan(RoutePlan):
    """Routes as index lists.  'Sent' lists are at the tokens' home, 'received' ones at the experts.

    Attributes:
        sent_token: int32 [pairs sent]: the token of each (destination rank, token) pair.
        sent_pick: int32 [picks sent]: index token * top_k + k of each pick, in the order
            (destination rank, token, expert).
        pick_pair: int32 [picks received]: the received pair of each pick.
        pick_turn: int32 [picks received]: the pick's place among its pair's, by local expert.
        pick_slot: int32 [picks received]: the row it goes to; -1 when it was dropped.
        pairs_sent, picks_sent: per destination rank.
        pairs_received, picks_received: per source rank.
    """

    sent_token: torch.Tensor
    sent_pick: torch.Tensor
    pick_pair: torch.Tensor
    pick_turn: torch.Tensor
    pick_slot: torch.Tensor
    pairs_sent: list[int]
    picks_sent: list[int]
    pairs_received: list[int]
    picks_received: list[int]


class ReferenceEngine:
    """See `Engine`.  Waits for the host in every call: correct first, fast never.

    Args:
        reduction: how combine rounds; another one than the contract's is for comparing with an
            engine that declares it.
        machines: for comparing with an engine whose slots are in the order BY_RAIL: the grid that
            it has found.  MACHINE_SUMS_ROUNDED needs it.
    """

    ranks_per_expert = 1

    def __init__(
        self,
        group: EpGroup,
        num_experts: int,
        config: EpConfig,
        reduction: str = HOME_PART_UNROUNDED,
        machines: Machines | None = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise InputError(f"reduction {reduction!r}: must be one of {REDUCTIONS}")
        if reduction == MACHINE_SUMS_ROUNDED and machines is None:
            raise InputError(f"reduction {reduction!r}: needs to know the machines")
        slot_order = BY_RANK if machines is None else BY_RAIL
        self.caps = dataclasses.replace(CAPS, reduction=reduction, slot_order=slot_order)
        self._machines = machines
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.config = config
        self._shortage = Shortage.shared(group, config)
        self._closed = False

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor) -> ReferencePlan:
        """See `Engine.plan`."""
        self._require_open()
        num_ranks, num_local = self.group.size, self.num_local_experts
        agreement = agree_on_routes(self.group, topk_idx, self.num_experts, self.caps, self.config)
        num_tokens, top_k = topk_idx.shape

        # At home: the picks in the order (destination rank, token, expert), and their pairs.
        flat = topk_idx.reshape(-1).long()
        pick = (flat != NOT_ROUTED).nonzero().squeeze(1)
        token, expert = pick // top_k, flat[pick]
        pair_key = (expert // num_local) * num_tokens + token
        order = (pair_key * self.num_experts + expert).argsort()
        pick, expert, pair_key = pick[order], expert[order], pair_key[order]
        sent_pair, pair_of_pick = pair_key.unique_consecutive(return_inverse=True)
        pairs_sent = (sent_pair // max(num_tokens, 1)).bincount(minlength=num_ranks)
        picks_sent = (expert // num_local).bincount(minlength=num_ranks)

        # Tell everybody who sends how many pairs and picks to whom; then, which pick is whose.
        counts = self.group.gather(
            torch.stack([pairs_sent, picks_sent]).reshape(-1).cpu(),
            "plan, exchanging counts",
            self.config.timeout_s,
        ).view(num_ranks, 2, num_ranks)  # [source, pairs or picks, destination]
        self._check_row_counts(counts[:, 1].sum(dim=0).tolist())
        pairs_received = counts[:, 0, self.group.rank]
        picks_received = counts[:, 1, self.group.rank]
        first_sent = pairs_sent.cumsum(0) - pairs_sent
        picks = self._exchange(
            torch.stack(
                [pair_of_pick - first_sent[expert // num_local], expert % num_local], dim=1
            ),
            picks_sent.tolist(),
            picks_received.tolist(),
            "plan, exchanging picks",
        )
        # They arrive in the order (source rank, token, local expert).
        first_received = (pairs_received.cumsum(0) - pairs_received).repeat_interleave(
            picks_received
        )
        pick_pair = picks[:, 0] + first_received.to(picks.device)
        slots = self._slots(picks[:, 1], picks_received, num_tokens, top_k)

        _, picks_of_pair = pick_pair.unique_consecutive(return_counts=True)
        first_pick = (picks_of_pair.cumsum(0) - picks_of_pair).repeat_interleave(picks_of_pair)
        return ReferencePlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            num_rows=slots.num_rows,
            counts=slots.counts,
            sent_token=(sent_pair % max(num_tokens, 1)).int(),
            sent_pick=pick.int(),
            pick_pair=pick_pair.int(),
            pick_turn=(torch.arange(len(pick_pair), device=pick_pair.device) - first_pick).int(),
            pick_slot=slots.slot.int(),
            pairs_sent=pairs_sent.tolist(),
            picks_sent=picks_sent.tolist(),
            pairs_received=pairs_received.tolist(),
            picks_received=picks_received.tolist(),
        )

    @torch.no_grad()
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        kept = plan.pick_slot >= 0
        slot = plan.pick_slot[kept]

        received = self._exchange_rows(
            x[plan.sent_token], plan.pairs_sent, plan.pairs_received, "dispatch"
        )
        rows = x.new_zeros(plan.num_rows, x.shape[1])
        rows[slot] = received[plan.pick_pair[kept]]
        if w is None:
            return rows, None

        received_w = self._exchange(
            w.reshape(-1)[plan.sent_pick], plan.picks_sent, plan.picks_received, "dispatch, weights"
        )
        row_w = w.new_zeros(plan.num_rows)
        row_w[slot] = received_w[kept]
        return rows, row_w

    @torch.no_grad()
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`.

        Sums are fp32 (fp64 for fp64 rows) and start from +0: on the expert rank over a pair's picks
        in ascending local-expert order, rounded once for the wire; at home over the ranks in
        ascending order, the home rank's own part unrounded (unless the engine was made with
        another reduction), rounded once.
        """
        plan = self._agree("combine", plan, y, w)
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        kept = plan.pick_slot >= 0

        partial = y.new_zeros(sum(plan.pairs_received), y.shape[1], dtype=wide)
        for turn in range(int(plan.pick_turn.max()) + 1 if len(plan.pick_turn) else 0):
            now = kept & (plan.pick_turn == turn)  # at most one pick of each pair
            partial[plan.pick_pair[now]] += y[plan.pick_slot[now]].to(wide)

        out = self._add_up(plan, partial, y.dtype)
        if w is None:
            return out.to(y.dtype), None

        pick_w = torch.where(kept, w[plan.pick_slot.clamp(min=0)], 0) if len(w) else w
        returned_w = self._exchange(
            pick_w, plan.picks_received, plan.picks_sent, "combine, weights"
        )
        home_w = w.new_zeros(plan.num_tokens * plan.top_k)
        home_w[plan.sent_pick] = returned_w
        return out.to(y.dtype), home_w.view(plan.num_tokens, plan.top_k)

    def _add_up(
        self, plan: ReferencePlan, partial: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Bring the pairs' sums `partial` home, and add them up there: [num_tokens, hidden]."""
        rank, machines = self.group.rank, self._machines
        by_machine = self.caps.reduction == MACHINE_SUMS_ROUNDED
        # The part that is not rounded may be another rank's: then home rounds all that come.
        sent = partial if by_machine else partial.to(dtype)
        returned = self._exchange_rows(sent, plan.pairs_received, plan.pairs_sent, "combine")
        parts = list(returned.split(plan.pairs_sent))
        parts[rank] = partial.split(plan.pairs_received)[rank]
        tokens = plan.sent_token.split(plan.pairs_sent)

        def rounded(rows: torch.Tensor) -> torch.Tensor:
            return rows.to(dtype).to(partial.dtype)

        exact = [rank] if self.caps.reduction == HOME_PART_UNROUNDED else []
        together = [list(range(self.group.size))]
        if by_machine and machines is not None:
            exact = machines.rail_of(rank)
            together = [machines.ranks_of(machine) for machine in range(machines.count)]
        out = partial.new_zeros(plan.num_tokens, partial.shape[1])
        for ranks in together:
            total = torch.zeros_like(out)
            for other in ranks:
                total[tokens[other]] += parts[other] if other in exact else rounded(parts[other])
            out += rounded(total) if by_machine else total
        return out

    def make_low_latency(self, sizes: LowLatencySizes, number: int) -> ReferenceLowLatency:
        """See `create_low_latency`."""
        self._require_open()
        timeout_s = self.config.timeout_s
        return ReferenceLowLatency(self.group, self.num_experts, self.caps, sizes, timeout_s)

    def close(self) -> None:
        """See `Engine.close`.  Collective only where there is something to release."""
        if self._closed:
            return
        self._closed = True
        if self._shortage is not None:
            self.group.release(Shortage.name(self.config), self.config.timeout_s)

    def _check_row_counts(self, picks_per_rank: list[int]) -> None:
        """Refuse more rows than row numbers can name; every rank knows all counts, so all raise."""
        for rank, picks in enumerate(picks_per_rank):
            rows = picks + self.num_local_experts * (self.config.alignment - 1)
            if self.config.max_recv_rows is None and rows > self.caps.max_rows:
                raise InputError(
                    f"plan: rank {rank} would receive up to {rows} rows, more than the "
                    f"{self.caps.max_rows} that a row number can name: use smaller micro-batches"
                )

    def _slots(
        self, local_expert: torch.Tensor, by_source: torch.Tensor, num_tokens: int, top_k: int
    ) -> _Slots:
        """Give the received picks, `by_source` of them from each rank, their expert-major slots."""
        if self._machines is None:
            return self._slots_in_order(local_expert, num_tokens, top_k)
        picks = torch.arange(len(local_expert), device=local_expert.device)
        from_rank = picks.split(by_source.tolist())
        order = torch.cat([from_rank[rank] for rank in self._machines.ranks_by_rail()])
        slots = self._slots_in_order(local_expert[order], num_tokens, top_k)
        slot = torch.empty_like(slots.slot)
        slot[order] = slots.slot
        return dataclasses.replace(slots, slot=slot)

    def _slots_in_order(self, local_expert: torch.Tensor, num_tokens: int, top_k: int) -> _Slots:
        """Give picks, which come in the order of slots, their expert-major slots."""
        alignment, num_local = self.config.alignment, self.num_local_experts
        shape = (self.group.size, num_tokens, top_k, num_local, self.ranks_per_expert)
        limit = rows_limit(self.config, *shape)
        by_expert = local_expert.argsort(stable=True)
        wanted = local_expert.bincount(minlength=num_local)
        place = torch.empty_like(local_expert)  # of a pick in its expert's block
        place[by_expert] = torch.arange(len(place), device=place.device) - (
            wanted.cumsum(0) - wanted
        ).repeat_interleave(wanted)

        kept = torch.ones_like(local_expert, dtype=torch.bool)
        if limit is not None:
            # A pick that opens a stretch of `alignment` rows needs all of it; what comes after the
            # first pick that does not fit is dropped too, so that the order decides, not the luck.
            rows = (place % alignment == 0).long().cumsum(0) * alignment
            kept = rows <= limit
            if self._shortage is not None:
                self._shortage.note(self._needed(rows), limit)
        routed = local_expert[kept].bincount(minlength=num_local)
        padded = (routed + alignment - 1) // alignment * alignment
        num_rows = int(padded.sum()) if limit is None else limit
        slot = (padded.cumsum(0) - padded)[local_expert] + place
        slot = torch.where(kept, slot, -1)
        return _Slots(slot, num_rows, torch.cat([padded, routed, (~kept).sum().view(1)]))

    def _needed(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that every rank needs, int64 [num_ranks]; `rows`: up to each pick of this one."""
        mine = rows[-1:].sum().reshape(1)  # 0 without picks
        what = "plan, exchanging how many rows each rank needs"
        return self.group.gather(mine, what, self.config.timeout_s).flatten()

    def _agree(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> ReferencePlan:
        """Check the arguments of dispatch or combine on all ranks; return the plan, typed."""
        self._require_open()
        return agree_on_rows(
            phase,
            self.group,
            plan,
            ReferencePlan,
            rows,
            w,
            self.num_experts,
            self.caps,
            self.config.timeout_s,
        )

    def _exchange(
        self, sent: torch.Tensor, sent_splits: list[int], received_splits: list[int], what: str
    ) -> torch.Tensor:
        return exchange(self.group, sent, sent_splits, received_splits, what, self.config.timeout_s)

    def _exchange_rows(
        self, sent: torch.Tensor, sent_splits: list[int], received_splits: list[int], what: str
    ) -> torch.Tensor:
        return exchange_rows(
            self.group, sent, sent_splits, received_splits, what, self.config.timeout_s
        )

    def _require_open(self) -> None:
        if self._closed:
            raise GroupClosedError("the engine was closed: create a new one with create_engine()")


@dataclass(frozen=True)
class _Slots:
    """What `ReferenceEngine._slots` decides: `slot` is -1 for a dropped pick, `counts` a plan's."""

    slot: torch.Tensor
    num_rows: int
    counts: torch.Tensor
