"""The oracle: one process sees all ranks and moves one row at a time.

It shares no code with any engine.  Its purpose is to be read against docs/contract.md; faster ones
(megatron_ncclep/benchmark/table_oracle.py, with which `ncclep bench` checks full sizes on the
device, and the emulator's routing in C++) are compared with it, or with engines that are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True)
class Slot:
    """Who sits in one row of a rank's dispatched tensor."""

    source: int
    token: int
    assignment: int
    local_expert: int


@dataclass(frozen=True)
class OraclePlan:
    """Routes of the whole group.

    Attributes:
        topk_idx: of each rank, [num_tokens, top_k].
        slots: for each rank, one entry per row of its dispatched tensor; None is a zero row.
        routed: for each rank, the rows of each local expert that hold a token.
        padded: for each rank, the rows of each local expert's block.
        num_dropped: for each rank, assignments for its experts that did not fit.
    """

    topk_idx: list[torch.Tensor]
    slots: list[list[Slot | None]]
    routed: list[list[int]]
    padded: list[list[int]]
    num_dropped: list[int]


def oracle_plan(
    topk_idx: list[torch.Tensor],
    num_experts: int,
    alignment: int = 1,
    max_recv_rows: int | None = None,
    ranks_on_node: int | None = None,
) -> OraclePlan:
    """Give every assignment of every rank its slot.

    Args:
        topk_idx: of each rank, [num_tokens, top_k], -1 where an assignment goes nowhere.
        num_experts: E; rank r of R holds experts r * E / R to (r + 1) * E / R - 1.
        alignment: rows of a block are padded to a multiple of it.
        max_recv_rows: static mode, or None.
        ranks_on_node: sources come in the order BY_RAIL of such nodes; None: BY_RANK.
    """
    num_ranks = len(topk_idx)
    sources = list(range(num_ranks))
    if ranks_on_node is not None:  # by local index, then by node
        sources.sort(key=lambda rank: (rank % ranks_on_node, rank // ranks_on_node))
    num_local = num_experts // num_ranks
    plan = OraclePlan(topk_idx, [], [], [], [])
    for rank in range(num_ranks):
        blocks: list[list[Slot]] = [[] for _ in range(num_local)]
        num_rows, num_dropped, is_full = 0, 0, False
        for source in sources:
            for token in range(len(topk_idx[source])):
                for local_expert in range(num_local):
                    expert = rank * num_local + local_expert
                    for assignment, chosen in enumerate(topk_idx[source][token].tolist()):
                        if chosen != expert:
                            continue
                        block = blocks[local_expert]
                        needed = alignment if len(block) % alignment == 0 else 0
                        if max_recv_rows is not None and num_rows + needed > max_recv_rows:
                            is_full = True
                        if is_full:
                            num_dropped += 1
                            continue
                        num_rows += needed
                        block.append(Slot(source, token, assignment, local_expert))
        slots: list[Slot | None] = []
        padded = []
        for block in blocks:
            rows = (len(block) + alignment - 1) // alignment * alignment
            slots += [*block, *[None] * (rows - len(block))]
            padded.append(rows)
        if max_recv_rows is not None:
            slots += [None] * (max_recv_rows - len(slots))
        plan.slots.append(slots)
        plan.routed.append([len(block) for block in blocks])
        plan.padded.append(padded)
        plan.num_dropped.append(num_dropped)
    return plan


def oracle_rows_limit(
    max_recv_rows: int | str | None,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    alignment: int,
) -> int | None:
    """Rows of static mode: gives each assignment in turn to the expert where it costs most."""
    if not isinstance(max_recv_rows, str):
        return max_recv_rows
    num_local = num_experts // num_ranks
    num_assignments = num_ranks * num_tokens * min(top_k, num_local)
    if max_recv_rows != "worst":
        balanced = Fraction(max_recv_rows.removesuffix("x")) * num_tokens * top_k
        num_assignments = min(num_assignments, math.ceil(balanced))
    blocks, num_rows = [0] * num_local, 0
    for _ in range(num_assignments):
        # Where it opens an alignment block, and otherwise where the next one comes soonest.
        block = max(range(num_local), key=lambda i: blocks[i] % alignment or alignment)
        if blocks[block] % alignment == 0:
            num_rows += alignment
        blocks[block] += 1
    return max(num_rows, alignment)


def oracle_dispatch(
    plan: OraclePlan, x: list[torch.Tensor], w: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy rows `x` [num_tokens, hidden] and weights `w` [num_tokens, top_k] to their slots."""
    rows, row_w = [], []
    for slots in plan.slots:
        mine = torch.zeros(len(slots), x[0].shape[1], dtype=x[0].dtype)
        mine_w = torch.zeros(len(slots), dtype=w[0].dtype)
        for row, slot in enumerate(slots):
            if slot is not None:
                mine[row] = x[slot.source][slot.token]
                mine_w[row] = w[slot.source][slot.token][slot.assignment]
        rows.append(mine)
        row_w.append(mine_w)
    return rows, row_w


def oracle_combine(
    plan: OraclePlan,
    y: list[torch.Tensor],
    w: list[torch.Tensor],
    round_source_part: bool = False,
    ranks_on_node: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Add up rows `y` [num_rows, hidden] by token; return `w` [num_rows] to the assignments.

    The order of additions is the contract's: on an expert's rank over local experts, upwards, in
    fp32 (fp64 for fp64), rounded once; at the source rank over ranks, upwards, the source rank's
    part unrounded (with `round_source_part`: rounded like the others).  With `ranks_on_node` it
    is that of NODE_SUMS_ROUNDED: over the ranks of a node, the part of the one with the source
    rank's place there unrounded, rounded once; at the source rank over nodes, upwards.
    """
    dtype = y[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = y[0].shape[1]
    most = ranks_on_node or len(plan.slots)  # without nodes, all ranks are on one
    out, topk_w = [], []
    for source_rank, topk_idx in enumerate(plan.topk_idx):
        num_tokens, top_k = topk_idx.shape
        total = torch.zeros(num_tokens, hidden, dtype=wide)
        of_node = torch.zeros_like(total)
        values = torch.zeros(num_tokens, top_k, dtype=w[0].dtype)
        for rank, slots in enumerate(plan.slots):
            partial: dict[int, torch.Tensor] = {}
            for row, slot in enumerate(slots):  # slots are in the order of local experts
                if slot is None or slot.source != source_rank:
                    continue
                before = partial.get(slot.token, torch.zeros(hidden, dtype=wide))
                partial[slot.token] = before + y[rank][row].to(wide)
                values[slot.token, slot.assignment] = w[rank][row]
            for token, part in partial.items():
                is_exact = rank % most == source_rank % most and not round_source_part
                of_node[token] += part if is_exact else part.to(dtype).to(wide)
            if rank % most == most - 1:  # the node's last rank
                is_exact = ranks_on_node is None
                total += of_node if is_exact else of_node.to(dtype).to(wide)
                of_node.zero_()
        out.append(total.to(dtype))
        topk_w.append(values)
    return out, topk_w
