"""The contract for many and large cases: the same answers as `oracle.py`, as operations on tables.

For each destination there is a table with a row for every token of the group, in the order of
(source rank, token), and a column for each of its local experts.  Read row by row it is the order
in which picks are taken, and read column by column it is the order of slots.  Like the oracle it
sees all ranks, runs wherever its tensors are, and shares no code with any engine.

Two ranks, four experts, as in docs/contract.md; rank 0's table, with the slots that it gives:

                         expert 0   expert 1
    rank 0, token 0        0          2
    rank 0, token 1        1          -
    rank 1, token 0        -          3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.testing.oracle import sources_in_order


@dataclass(frozen=True)
class SlotTable:
    """Routes to one rank.

    Attributes:
        slot: int64 [tokens of all ranks, local experts]: the row of the dispatched tensor; -1 where
            there is no pick, or a dropped one.
        pick: int64, like `slot`: which of the token's picks it is.
        token_of_row: int64 [num_rows]: row of this table; -1 for a zero row.
        pick_of_row: int64 [num_rows].
        routed, padded: int64 [local experts], as in `RoutePlan`.
        num_dropped: int64 scalar.
    """

    slot: torch.Tensor
    pick: torch.Tensor
    token_of_row: torch.Tensor
    pick_of_row: torch.Tensor
    routed: torch.Tensor
    padded: torch.Tensor
    num_dropped: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the dispatched tensor."""
        return len(self.token_of_row)


def slot_table(
    rank: int,
    topk_idx: list[torch.Tensor],
    num_experts: int,
    alignment: int = 1,
    max_recv_rows: int | None = None,
    ranks_on_machine: int | None = None,
) -> SlotTable:
    """Give every pick for `rank` its slot; arguments as in `oracle_plan`."""
    num_local = num_experts // len(topk_idx)
    order = sources_in_order(len(topk_idx), ranks_on_machine)
    picks = torch.cat([topk_idx[source].long() for source in order])
    device, num_tokens = picks.device, len(picks)
    pick = torch.full((num_tokens, num_local), -1, device=device)
    for k in range(picks.shape[1]):
        local = picks[:, k] - rank * num_local
        token = ((picks[:, k] >= 0) & (local >= 0) & (local < num_local)).nonzero()[:, 0]
        pick[token, local[token]] = k

    is_pick = pick >= 0
    place = is_pick.cumsum(0) - 1  # of a pick in its expert's block
    opens = is_pick & (place % alignment == 0)
    kept = is_pick
    if max_recv_rows is not None:
        rows_needed = opens.flatten().cumsum(0).view_as(opens) * alignment
        kept = is_pick & (rows_needed <= max_recv_rows)
    routed = kept.sum(0)
    padded = (routed + alignment - 1) // alignment * alignment
    slot = torch.where(kept, padded.cumsum(0) - padded + place, -1)

    num_rows = int(padded.sum()) if max_recv_rows is None else max_recv_rows
    token_of_row = torch.full((num_rows,), -1, device=device)
    pick_of_row = torch.full((num_rows,), -1, device=device)
    token_of_row[slot[kept]] = kept.nonzero()[:, 0]
    pick_of_row[slot[kept]] = pick[kept]
    num_dropped = is_pick.sum() - kept.sum()
    return SlotTable(slot, pick, token_of_row, pick_of_row, routed, padded, num_dropped)


def table_dispatch(
    table: SlotTable,
    x: list[torch.Tensor],
    w: list[torch.Tensor] | None = None,
    rows: slice = slice(None),
    ranks_on_machine: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What one rank receives of all ranks' `x` and `w`; `rows`: only these rows.

    `ranks_on_machine` as for the table.
    """
    token, pick = table.token_of_row[rows], table.pick_of_row[rows]
    filled = (token >= 0).nonzero()[:, 0]
    out = x[0].new_zeros(len(token), x[0].shape[1])
    out_w = None if w is None else w[0].new_zeros(len(token))
    first = 0
    for source in sources_in_order(len(x), ranks_on_machine):
        of_source = x[source]
        mine = filled[(token[filled] >= first) & (token[filled] < first + len(of_source))]
        out[mine] = of_source[token[mine] - first]
        if w is not None:
            assert out_w is not None
            out_w[mine] = w[source][token[mine] - first, pick[mine]]
        first += len(of_source)
    return out, out_w


def table_combine(
    tables: list[SlotTable],
    num_tokens: list[int],
    home: int,
    top_k: int,
    y: list[torch.Tensor],
    w: list[torch.Tensor] | None = None,
    round_home: bool = False,
    ranks_on_machine: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What comes home to the tokens of rank `home` of all ranks' `y` and `w`.

    In the contract's order of additions, which `oracle_combine` spells out.

    Args:
        tables: of all ranks.
        num_tokens: of all ranks.
        home: whose tokens.
        top_k: K.
        y: rows of all ranks.
        w: values of all ranks, or None.
        round_home: whether the home rank's own part is rounded like the others.
        ranks_on_machine: as in `oracle_combine`, and as for the tables.
    """
    dtype, device = y[0].dtype, y[0].device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    order = sources_in_order(len(tables), ranks_on_machine)
    start = sum(num_tokens[source] for source in order[: order.index(home)])
    most = ranks_on_machine or len(tables)
    mine = slice(start, start + num_tokens[home])
    total = torch.zeros(num_tokens[home], y[0].shape[1], dtype=wide, device=device)
    of_machine = torch.zeros_like(total)
    values = None if w is None else w[0].new_zeros(num_tokens[home], top_k)
    for rank, table in enumerate(tables):
        slots, picks = table.slot[mine], table.pick[mine]
        part = torch.zeros_like(total)
        for local_expert in (slots >= 0).any(0).nonzero()[:, 0].tolist():  # upwards
            token = (slots[:, local_expert] >= 0).nonzero()[:, 0]
            slot = slots[token, local_expert]
            part[token] += y[rank][slot].to(wide)
            if values is not None and w is not None:
                values[token, picks[token, local_expert]] = w[rank][slot]
        # A token without rows there gets a zero, which changes no sum.
        is_exact = rank % most == home % most and not round_home
        of_machine += part if is_exact else part.to(dtype).to(wide)
        if rank % most == most - 1:
            total += of_machine.to(dtype).to(wide) if ranks_on_machine else of_machine
            of_machine.zero_()
    return total.to(dtype), values
