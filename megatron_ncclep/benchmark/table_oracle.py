"""The contract for many and large cases, as operations on tables.

It gives the same results as tests/oracle.py, which works row by row.  It also runs on GPUs, if the
tensors of all ranks fit, and is for tests and for the checks of `ncclep bench`.  A test compares
the two.

For each destination there is a table with a row for every token of the group, in the order of
(source rank, token), and a column for each of its local experts.  Row by row it gives the order in
which assignments are placed, column by column the order of slots.  Like the oracle it sees all
ranks, runs wherever its tensors are, and shares no code with any engine.

Two ranks, four experts, as in docs/contract.md; rank 0's table, with the slots that it gives:

                         expert 0   expert 1
    rank 0, token 0        0          2
    rank 0, token 1        1          -
    rank 1, token 0        -          3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotTable:
    """Routes to one rank.

    Attributes:
        sources: the ranks in the order in which `slot` has their tokens.
        slot: int64 [tokens of all ranks, local experts]: the row of the dispatched tensor; -1 where
            there is no assignment, or a dropped one.
        assignment: int64, like `slot`: which of the token's assignments it is.
        token_of_row: int64 [num_rows]: row of this table; -1 for a zero row.
        assignment_of_row: int64 [num_rows].
        routed, padded: int64 [local experts], as in `RoutePlan`.
        num_dropped: int64 scalar.
    """

    sources: list[int]
    slot: torch.Tensor
    assignment: torch.Tensor
    token_of_row: torch.Tensor
    assignment_of_row: torch.Tensor
    routed: torch.Tensor
    padded: torch.Tensor
    num_dropped: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the dispatched tensor."""
        return len(self.token_of_row)


def sources_in_order(num_ranks: int, ranks_on_node: int | None) -> list[int]:
    """The order of source ranks within an expert's block: BY_RAIL with `ranks_on_node`."""
    if ranks_on_node is None:
        return list(range(num_ranks))
    return sorted(range(num_ranks), key=lambda r: (r % ranks_on_node, r // ranks_on_node))


def slot_table(
    rank: int,
    topk_idx: list[torch.Tensor],
    num_experts: int,
    alignment: int = 1,
    max_recv_rows: int | None = None,
    ranks_on_node: int | None = None,
) -> SlotTable:
    """Give every assignment for `rank` its slot; arguments as in `oracle_plan`."""
    num_local = num_experts // len(topk_idx)
    order = sources_in_order(len(topk_idx), ranks_on_node)
    assignments = torch.cat([topk_idx[source].long() for source in order])
    device, num_tokens = assignments.device, len(assignments)
    assignment = torch.full((num_tokens, num_local), -1, device=device)
    for k in range(assignments.shape[1]):
        local = assignments[:, k] - rank * num_local
        token = ((assignments[:, k] >= 0) & (local >= 0) & (local < num_local)).nonzero()[:, 0]
        assignment[token, local[token]] = k

    is_assignment = assignment >= 0
    rank_in_expert = is_assignment.cumsum(0) - 1  # of an assignment in its expert's block
    opens = is_assignment & (rank_in_expert % alignment == 0)
    kept = is_assignment
    if max_recv_rows is not None:
        rows_needed = opens.flatten().cumsum(0).view_as(opens) * alignment
        kept = is_assignment & (rows_needed <= max_recv_rows)
    routed = kept.sum(0)
    padded = (routed + alignment - 1) // alignment * alignment
    slot = torch.where(kept, padded.cumsum(0) - padded + rank_in_expert, -1)

    num_rows = int(padded.sum()) if max_recv_rows is None else max_recv_rows
    token_of_row = torch.full((num_rows,), -1, device=device)
    assignment_of_row = torch.full((num_rows,), -1, device=device)
    token_of_row[slot[kept]] = kept.nonzero()[:, 0]
    assignment_of_row[slot[kept]] = assignment[kept]
    num_dropped = is_assignment.sum() - kept.sum()
    return SlotTable(
        order, slot, assignment, token_of_row, assignment_of_row, routed, padded, num_dropped
    )


def table_dispatch(
    table: SlotTable,
    x: list[torch.Tensor],
    w: list[torch.Tensor] | None = None,
    *,
    rows: slice = slice(None),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that one rank receives from all ranks' `x` and `w`; `rows`: only these rows."""
    token, assignment = table.token_of_row[rows], table.assignment_of_row[rows]
    filled = (token >= 0).nonzero()[:, 0]
    out = x[0].new_zeros(len(token), x[0].shape[1])
    out_w = None if w is None else w[0].new_zeros(len(token))
    first = 0
    for source in table.sources:
        of_source = x[source]
        mine = filled[(token[filled] >= first) & (token[filled] < first + len(of_source))]
        out[mine] = of_source[token[mine] - first]
        if w is not None:
            assert out_w is not None
            out_w[mine] = w[source][token[mine] - first, assignment[mine]]
        first += len(of_source)
    return out, out_w


def table_combine(
    tables: list[SlotTable],
    num_tokens: list[int],
    source_rank: int,
    top_k: int,
    y: list[torch.Tensor],
    w: list[torch.Tensor] | None = None,
    round_source_part: bool = False,
    ranks_on_node: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results for the tokens of rank `source_rank`, from all ranks' `y` and `w`.

    In the contract's order of additions, which `oracle_combine` spells out.

    Args:
        tables: of all ranks.
        num_tokens: of all ranks.
        source_rank: whose tokens.
        top_k: K.
        y: rows of all ranks.
        w: values of all ranks, or None.
        round_source_part: whether the source rank's own part is rounded like the others.
        ranks_on_node: as in `oracle_combine`.
    """
    dtype, device = y[0].dtype, y[0].device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before = tables[0].sources[: tables[0].sources.index(source_rank)]
    start = sum(num_tokens[source] for source in before)
    most = ranks_on_node or len(tables)
    mine = slice(start, start + num_tokens[source_rank])
    total = torch.zeros(num_tokens[source_rank], y[0].shape[1], dtype=wide, device=device)
    of_node = torch.zeros_like(total)
    values = None if w is None else w[0].new_zeros(num_tokens[source_rank], top_k)
    for rank, table in enumerate(tables):
        slots, assignments = table.slot[mine], table.assignment[mine]
        part = torch.zeros_like(total)
        for local_expert in (slots >= 0).any(0).nonzero()[:, 0].tolist():  # in ascending order
            token = (slots[:, local_expert] >= 0).nonzero()[:, 0]
            slot = slots[token, local_expert]
            part[token] += y[rank][slot].to(wide)
            if values is not None and w is not None:
                values[token, assignments[token, local_expert]] = w[rank][slot]
        # A token without rows there gets a zero, which changes no sum.
        is_exact = rank % most == source_rank % most and not round_source_part
        of_node += part if is_exact else part.to(dtype).to(wide)
        if rank % most == most - 1:
            total += of_node.to(dtype).to(wide) if ranks_on_node else of_node
            of_node.zero_()
    return total.to(dtype), values
