"""One shape's routing and payload: who sends what where, and what crosses the wire.

The payload is that of testing/contents.py, in which every value is a hash of its place, so that any
rank can write down what another one has without having it sent.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from megatron_ncclep.testing import contents
from megatron_ncclep.testing.cases import Case
from megatron_ncclep.testing.table_oracle import SlotTable, slot_table

# What a tensor is: each has values of its own, so that a result left over from another pass shows.
X, GRAD_OUT, Y, GRAD_ROWS, WEIGHTS, GRAD_WEIGHTS = range(1, 7)
OF_TOKENS = (X, GRAD_OUT)


class Workload:
    """One shape's routing on this rank, shared by all subjects, which only read its tensors.

    Args:
        case: the shape.
        rank: of this process.
        ffn_hidden_size: of one expert; None: the shape does not say.

    Attributes:
        tables: the routes to each rank.
        topk_idx: int64 [T, K].
        x, grad_out: [T, H].
        w: fp32 [T, K].
        y, grad_rows: [N, H].
        grad_row_w: fp32 [N].
        shared: what subjects made for each other, by name, as long as one of them holds it.
    """

    def __init__(self, case: Case, rank: int, ffn_hidden_size: int | None = None) -> None:
        self.case, self.rank, self.ffn_hidden_size = case, rank, ffn_hidden_size
        self.tables = tables_of_case(case)
        self.topk_idx = case.topk_idx(rank)
        self.x, self.grad_out = self.rows(X, rank), self.rows(GRAD_OUT, rank)
        self.y, self.grad_rows = self.rows(Y, rank), self.rows(GRAD_ROWS, rank)
        self.w, self.grad_row_w = self.weights(WEIGHTS, rank), self.weights(GRAD_WEIGHTS, rank)
        self.shared: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def rows(self, what: int, rank: int, width: int | None = None) -> torch.Tensor:
        """[T or N, width] of `rank`: the first `width` columns, all of them by default."""
        of_tokens = what in OF_TOKENS
        num_rows = self.case.tokens[rank] if of_tokens else self.tables[rank].num_rows
        return payload(self.case, what, rank, num_rows, width)

    def weights(self, what: int, rank: int) -> torch.Tensor:
        """fp32 of `rank`: WEIGHTS [T, K] or GRAD_WEIGHTS [N]; above 0.5, at most 1."""
        shape: tuple[int, ...] = (self.tables[rank].num_rows,)
        if what == WEIGHTS:
            shape = (self.case.tokens[rank], self.case.top_k)
        return contents.weights_of(rank, shape, what, self.case.device).mul_(0.5).add_(0.5)

    def tokens_of(self, rank: int) -> slice:
        """The tokens of `rank` among those of the group, in which its ranks stand in order."""
        first = sum(self.case.tokens[:rank])
        return slice(first, first + self.case.tokens[rank])

    def every(self, what: int) -> list[torch.Tensor]:
        """What each rank has."""
        make = self.weights if what in (WEIGHTS, GRAD_WEIGHTS) else self.rows
        return [make(what, rank) for rank in range(self.case.num_ranks)]


def payload(
    case: Case, what: int, rank: int, num_rows: int, width: int | None = None
) -> torch.Tensor:
    """[num_rows, width] from 0.5 to 1.5: sums do not cancel, and a relative tolerance means it."""
    rows = contents.rows_of(rank, num_rows, width or case.hidden, case.dtype, what, case.device)
    return rows.mul_(0.5).add_(1)


def tables_of_case(case: Case, ranks_on_node: int | None = None) -> list[SlotTable]:
    """The routes of a case to each of its ranks."""
    topk_idx = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    return tables_of(topk_idx, case.num_experts, case.alignment, ranks_on_node)


def tables_of(
    topk_idx: list[torch.Tensor],
    num_experts: int,
    alignment: int = 1,
    ranks_on_node: int | None = None,
) -> list[SlotTable]:
    """The routes to each rank; arguments as of `slot_table`."""
    return [
        slot_table(rank, topk_idx, num_experts, alignment, ranks_on_node=ranks_on_node)
        for rank in range(len(topk_idx))
    ]


def wire_rows(tables: list[SlotTable], num_tokens: list[int]) -> int:
    """Rows that the busiest rank must send or receive, whichever is more.

    A token's row crosses the wire once for each other rank that has an expert of it, however many
    of its experts are there.

    Example: two ranks with two experts each, top-2.  Rank 0's token 0 goes to experts 2 and 3: one
    row from rank 0 to rank 1.  Its token 1 goes to 0 and 1: none.  Rank 1's token 0 goes to 1 and
    2: one row from rank 1 to rank 0.  Every rank sends one row and receives one: the answer is 1.

    Args:
        tables: of all ranks.
        num_tokens: of all ranks.
    """
    crossing = _by_source(_assignments(tables) > 0, num_tokens)
    return _busiest(crossing.fill_diagonal_(0))


def network_rows(
    tables: list[SlotTable], num_tokens: list[int], ranks_on_each: int
) -> tuple[int, int]:
    """Rows that the busiest rank must send or receive over the network between nodes.

    Args:
        tables, num_tokens: of all ranks.
        ranks_on_each: L, ranks on a node; node m has ranks m * L to m * L + L - 1.

    Returns:
        With `hierarchical`, where a token's row crosses once for each other node that has an
        expert of it, to the rank with the same local index; and with a flat all-to-all, where it
        crosses once for each of its assignments to another node.

    Example: two nodes of two ranks, an expert on each rank.  Rank 0's token goes to experts 2 and
    3: with `hierarchical` one row, to rank 2; flat two, to ranks 2 and 3.
    """
    R, L = len(tables), ranks_on_each
    rank = torch.arange(R)
    assignments = _assignments(tables)
    flat = _by_source(assignments, num_tokens)
    to_node = _by_source(assignments.view(-1, R // L, L).sum(2) > 0, num_tokens)
    once = torch.zeros_like(flat)
    for node in range(R // L):
        once[rank, node * L + rank % L] = to_node[:, node]
    for crossing in (once, flat):
        crossing[rank[:, None] // L == rank // L] = 0  # inside a node
    return _busiest(once), _busiest(flat)


def _assignments(tables: list[SlotTable]) -> torch.Tensor:
    """int64 [tokens of the group, num_ranks]: how many experts a token has on each rank."""
    return torch.stack([(table.slot >= 0).sum(dim=1) for table in tables], dim=1)


def _by_source(rows: torch.Tensor, num_tokens: list[int]) -> torch.Tensor:
    """int64 [num_ranks, n], on the CPU: the rows of `rows` added up for each source rank."""
    return torch.stack([part.sum(dim=0) for part in rows.split(num_tokens)]).cpu()


def _busiest(crossing: torch.Tensor) -> int:
    """The most that a rank sends or receives; `crossing` [num_ranks, num_ranks]: from, to."""
    return int(torch.maximum(crossing.sum(dim=1), crossing.sum(dim=0)).max())
