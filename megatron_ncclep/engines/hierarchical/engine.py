"""The engine for several nodes: the process group's all-to-all between them, another engine inside.

It has no network code: between nodes, rows travel by NCCL (gloo on CPUs).  Inside a node `native`
moves them, or `reference` where `native` cannot run.  ranks/nodes.py defines the grid.

    plan       the source rank finds out which nodes each of its tokens needs.  It sends the token's
               assignments there to the rank of that node with its own local index (its rail).  The
               node's engine plans the received tokens as if they were that rank's own batch.
    dispatch   a token's row crosses the network once for each other node that needs it; then the
               node's engine dispatches the rows of all nodes' tokens among its ranks.
    combine    the reverse: the node's engine adds up a token's rows at its rail's rank, one sum
               goes back over the network, and the source rank adds the nodes' sums in ascending
               order.

A worked example.  Two nodes with two ranks each, four experts (rank r has expert r), top-2:

    rank 0: token 0 -> experts 1, 2    crosses to rank 2, which has expert 2 itself
            token 1 -> experts 0, 1    stays on its node
    rank 3: token 0 -> experts 3, 0    crosses to rank 1, which dispatches it to rank 0

    rank 0's rows, all of expert 0: (rank 0, token 1), (rank 3, token 0)

The tokens that a node's engine gets from one rank are ordered by node, then token, so an expert's
rows are in the order of (local index, node, token), BY_RAIL.  Ordering them by rank would cost a
pass over all rows.  In static mode the same order decides what is dropped.

A node's part of a sum is the contract's for that node, with the rail's rank as source rank:
its own part unrounded, the sum rounded to the payload's dtype.  The source rank adds these sums in
fp32, its own node's like the others, and rounds once: NODE_SUMS_ROUNDED.

In exact mode only the tokens that a node needs cross, and a plan exchanges their numbers.  In
static mode all tokens cross to all nodes, even those without assignments there, so the sizes follow
from the batch, and if the engine inside never waits, no call waits for a device or, from the second
call with the same shapes on, for another host.

Rows cross in chunks of columns, each of which moves inside its node while the next one crosses; in
combine it crosses while the next one is added up inside.  The engine inside sees a smaller hidden
size and the same plan, so chunks change neither any bit of the results nor the order of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ncclep.config import DROP, EpConfig
from megatron_ncclep.engines import checks
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import (
    BY_RAIL,
    NODE_SUMS_ROUNDED,
    NOT_ROUTED,
    TOO_MANY_EXPERTS,
    Engine,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.hierarchical.agreement import Calls
from megatron_ncclep.engines.hierarchical.availability import NAME, engine_inside
from megatron_ncclep.engines.hierarchical.internode_routes import (
    Crossing,
    HierarchicalPlan,
    all_cross,
    needed_cross,
)
from megatron_ncclep.engines.hierarchical.message_packing import (
    Piece,
    add_up,
    pack,
    pieces_of,
    unpack,
)
from megatron_ncclep.engines.native.engine import CAPS as NATIVE_CAPS
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.overflow import assignments_of_experts, rows_needed
from megatron_ncclep.engines.reference.engine import ReferenceEngine
from megatron_ncclep.errors import InputError, PeerError
from megatron_ncclep.ranks.all_to_all import AllToAll
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import grid_of

# The limits of `native`, even where `reference` is inside: a job that runs on CPUs must run on
# GPUs.
CAPS = EngineCaps(
    name=NAME,
    reduction=NODE_SUMS_ROUNDED,
    slot_order=BY_RAIL,
    payload_dtypes=NATIVE_CAPS.payload_dtypes,
    row_bytes_multiple=NATIVE_CAPS.row_bytes_multiple,
    options=NATIVE_CAPS.options | {"network_chunks"},
    moves_bytes=NATIVE_CAPS.moves_bytes,
    max_top_k=NATIVE_CAPS.max_top_k,
    max_local_experts=NATIVE_CAPS.max_local_experts,
    captures_static=True,  # where `native` is inside
)
# Bytes to each node that make a chunk worth its messages, and the most chunks unless the option
# network_chunks asks for more: each costs launches, and writes its columns of the rows again.
CHUNK_BYTES, MOST_CHUNKS = 8 * 2**20, 4
INSIDE: dict[str, type[NativeEngine] | type[ReferenceEngine]] = {
    "native": NativeEngine,
    "reference": ReferenceEngine,
}


class HierarchicalEngine(EngineBase[HierarchicalPlan]):
    """See `Engine`.

    In static mode, with an engine inside that never waits, hosts agree on a call only when its
    shapes are new; otherwise they agree on every call and wait for the network transfers.
    """

    plan_type = HierarchicalPlan

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; finds the nodes and makes the group of each one's ranks, if need be."""
        self._grid = grid_of(group, group.deadline_s(config))
        self.nodes = self._grid.nodes
        self._experts_of_node = num_experts // self.nodes.count
        self.inside, reason = engine_inside(group, self._grid, config, num_experts)
        self._make_inside = INSIDE[self.inside]
        captures_static = self._make_inside.caps.captures_static
        self.caps = dataclasses.replace(CAPS, captures_static=captures_static)
        super().__init__(group, num_experts, config)
        self._calls = Calls(self)
        self._waits = not self._calls.go_on
        self._engine: NativeEngine | ReferenceEngine | None = None  # this node's
        why = reason and f" ({reason})"
        group.announce(f"hierarchical: {self.nodes}, {self.inside!r} inside a node{why}")

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor, zero_unused: bool = True) -> HierarchicalPlan:
        """See `Engine.plan`.

        Where hosts do not agree, an index that is not an expert, or an expert named twice, counts
        as not routed, and a later call of `plan` raises InputError, as with the engine `native`.
        """
        self.require_open()
        call, most_tokens = self._calls.enter_plan(topk_idx)
        self.streams.keep(topk_idx)
        top_k = topk_idx.shape[1]
        is_expert = (topk_idx >= 0) & (topk_idx < self.num_experts)
        assignment_node = topk_idx.div(self._experts_of_node, rounding_mode="floor")
        assignment_node = assignment_node.where(is_expert, NOT_ROUTED)
        node = torch.arange(self.nodes.count, device=topk_idx.device)[:, None, None]
        is_on_node = assignment_node == node  # [nodes, num_tokens, top_k]
        crossing = self._crossing(is_on_node.any(dim=2), most_tokens)

        # Where an assignment is on another node; for a token with an invalid routing that no host
        # has checked an invalid expert, so that all nodes report it.
        _, is_wrong = checks.wrong_indices(topk_idx, self.num_experts)
        wrong = is_wrong.any(dim=1, keepdim=True)
        elsewhere = torch.where(wrong, TOO_MANY_EXPERTS, NOT_ROUTED).to(topk_idx.dtype)
        assignments = topk_idx - node * self._experts_of_node
        assignments = assignments.where(is_on_node, elsewhere).int()
        what = "plan, exchanging assignments between nodes"
        crossed = self._start(
            crossing.rows_of(assignments), (crossing.sent, crossing.received), what
        )
        received = crossed.finish(self._waits)
        engine = self._engine_inside()

        def plan_inside() -> RoutePlan:
            with self._inside():
                return engine.plan(received, zero_unused)

        if self._waits:
            what = "plan inside the nodes"
            inside = self.group.hosts.on_all_ranks(what, plan_inside, self.timeout_s)
        else:
            inside = plan_inside()
        self._record_overflow(topk_idx.where(is_expert, NOT_ROUTED), most_tokens)
        self._end_call("plan")
        return HierarchicalPlan(
            plan_id=call,
            num_tokens=len(topk_idx),
            top_k=top_k,
            made_by=self,
            num_rows=inside.num_rows,
            counts=inside.counts,
            inside=inside,
            most_tokens=most_tokens,
            crossing=crossing,
            assignment_node=assignment_node.int(),
        )

    @torch.no_grad()
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        self.require_open()
        plan = self._calls.enter("dispatch", plan, x, w)
        self.streams.keep(*plan.tensors(), x, w)
        pieces = self._pieces(plan, x)
        token, sizes = plan.crossing.token, (plan.crossing.sent, plan.crossing.received)
        num_sent = sum(plan.crossing.sent)
        # The pieces cross one after the other, while those that have arrived move inside the node.
        crossing = []
        for piece in pieces:
            weights = w if piece.first == 0 else None
            message = pack(x, piece, weights, token, num_sent, plan.most_tokens)
            crossing.append(self._start(message, sizes, "dispatch between nodes"))
        rows, row_w = None, None
        for piece in pieces:
            num_weights = 0 if w is None or piece.first else plan.top_k
            messages = crossing.pop(0).finish(self._waits)
            inputs = unpack(messages, piece, num_weights, x.dtype)
            with self._inside():
                part, part_w = plan.inside.made_by.dispatch(plan.inside, *inputs)
            row_w = part_w if piece.first == 0 else row_w
            if len(pieces) == 1:
                rows = part
                break
            if rows is None:
                rows = x.new_empty(len(part), x.shape[1])
            rows[:, piece.numbers(x.dtype)] = part
        assert rows is not None  # there is a piece
        self._end_call("dispatch")
        return rows, row_w

    @torch.no_grad()
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`.

        Sums start from +0 in fp32: inside a node as its engine adds them, rounded; then at the
        source rank over the nodes in ascending order, rounded once.
        """
        self.require_open()
        plan = self._calls.enter("combine", plan, y, w)
        self.streams.keep(*plan.tensors(), y, w)
        pieces = self._pieces(plan, y)
        crossing = []
        for piece in pieces:
            part = y[:, piece.numbers(y.dtype)].contiguous()
            with self._inside():
                weights = w if piece.first == 0 else None
                sums, values = plan.inside.made_by.combine(plan.inside, part, weights)
            whole = Piece(0, piece.size)
            message = pack(sums, whole, values, None, len(sums), len(sums))
            what = "combine between nodes"
            sizes = (plan.crossing.received, plan.crossing.sent)
            crossing.append(self._start(message, sizes, what))
        out = y.new_empty(plan.num_tokens, y.shape[1])
        topk_w = None if w is None else w.new_empty(plan.num_tokens, plan.top_k)
        for piece in pieces:
            messages = crossing.pop(0).finish(self._waits)
            values = topk_w if piece.first == 0 else None
            index = plan.crossing.message_index
            add_up(messages, piece, index, out, plan.assignment_node, values)
        self._end_call("combine")
        return out, topk_w

    def _release(self) -> None:
        """Close the node's engine.  The grid stays, for other engines of the group."""
        self._calls.close()
        if self.group.torch.is_alive and self._engine is not None:
            self._engine.close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Add to errors from inside the node how its ranks map to those of the group."""
        try:
            yield
        except (PeerError, InputError) as error:
            node = self.nodes.node_of(self.group.rank)
            ranks = self.nodes.ranks_of(node)
            text = (
                f"inside node {node}, whose ranks 0 to {len(ranks) - 1} are ranks "
                f"{ranks[0]} to {ranks[-1]} of the group: {error}"
            )
            raise type(error)(text) from error

    def _crossing(self, needed: torch.Tensor, most_tokens: int) -> Crossing:
        """Find out which tokens cross, and how many.  Collective.

        Args:
            needed: bool [nodes, num_tokens].
            most_tokens: see `Calls.enter_plan`.
        """
        if self.config.max_recv_rows is not None:
            return all_cross(needed, most_tokens)
        sent = needed.sum(dim=1).cpu()
        what = "plan, exchanging the numbers of tokens that cross"
        counts = self.group.hosts.gather(sent, what, self.timeout_s)
        rank = self.group.rank
        rail, node = self.nodes.rail_of(rank), self.nodes.node_of(rank)
        return needed_cross(needed, sent.tolist(), counts[rail, node].tolist())

    def _engine_inside(self) -> Engine:
        """The node's engine, created by the first plan.  Collective then."""
        if self._engine is None:
            # This engine reports dropped rows itself, because all of its ranks must know.
            inside = dataclasses.replace(self.config, engine=self.inside, on_overflow=DROP)
            self._engine = self._make_inside(self._grid.local, self._experts_of_node, inside)
            self._engine.ranks_per_expert = self.ranks_per_expert
            self._engine.num_nodes = self.nodes.count
        return self._engine

    def _record_overflow(self, topk_idx: torch.Tensor, most_tokens: int) -> None:
        """Record how many rows each rank needs, for `on_overflow="raise"`.  Collective."""
        if self._overflow_report is None:
            return
        limit = self.rows_limit(most_tokens, topk_idx.shape[1])
        assert limit is not None  # or nothing would be recorded
        counts = assignments_of_experts(topk_idx, self.num_experts)
        each = [1] * self.group.size
        what = "plan, exchanging the number of rows that each rank needs"
        sent = counts.expand(self.group.size, -1)
        exchange = AllToAll(self.group, sent, each, each, what, self.timeout_s)
        needed = rows_needed(exchange.finish(self._waits), self.config.block_alignment)
        self._overflow_report.record(needed, limit)

    def _pieces(self, plan: HierarchicalPlan, rows: torch.Tensor) -> list[Piece]:
        """The chunks in which rows cross; the same on all ranks."""
        row_bytes = rows.shape[1] * rows.itemsize
        number = self.config.network_chunks
        if number is None:
            message_bytes = plan.most_tokens * row_bytes if self.nodes.count > 1 else 0
            number = min(max(1, message_bytes // CHUNK_BYTES), MOST_CHUNKS)
        return pieces_of(row_bytes, number)

    def _start(
        self, messages: torch.Tensor, sizes: tuple[list[int], list[int]], what: str
    ) -> AllToAll:
        """Start sending `messages` over this rank's rail.  Does not wait.

        Collective over the whole group, in one all-to-all that sends nothing off the rail.
        """
        splits = []
        for for_nodes in sizes:
            for_ranks = [0] * self.group.size
            for rank, number in zip(self.nodes.rail_of(self.group.rank), for_nodes, strict=True):
                for_ranks[rank] = number
            splits.append(for_ranks)
        sent, received = splits
        return AllToAll(self.group, messages, sent, received, what, self.timeout_s)

    def _end_call(self, phase: str) -> None:
        """End of every call: let `check` wait for transfers that no host has waited for."""
        if not self._waits:
            self._grid.pending_transfers.record(f"{phase} between nodes", self.timeout_s)
