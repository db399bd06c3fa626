"""Routes: where every pick of the whole group must go, by sorting, and what crosses the wire.

Written against docs/contract.md and sharing no code with any engine: what they do is compared with
this.  `megatron_ncclep/testing/oracle.py` says the same one row at a time; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routes:
    """Routes of the whole group; G is the number of tokens of all ranks together, in rank order.

    Attributes:
        num_experts: E.
        expert: int64 [G, top_k]; -1: the pick goes nowhere.
        slot: int64 [G, top_k]: the pick's row on its expert's rank; -1: none.
        source: int64 [G]: the rank whose token it is.
        first: for each rank, its first token among the G; then G.
        routed: int64 [num_ranks, num_local_experts]: rows of each expert that hold a token.
        padded: likewise, rows of each expert's block.
    """

    num_experts: int
    expert: torch.Tensor
    slot: torch.Tensor
    source: torch.Tensor
    first: list[int]
    routed: torch.Tensor
    padded: torch.Tensor

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.routed)

    @property
    def destination(self) -> torch.Tensor:
        """int64 [G, top_k]: the rank of each pick's expert; -1 where it goes nowhere."""
        return torch.div(self.expert, self.routed.shape[1], rounding_mode="floor")

    def num_rows(self, rank: int) -> int:
        """Rows of the dispatched tensor on `rank`."""
        return int(self.padded[rank].sum())

    def tokens(self, rank: int) -> slice:
        """The tokens of `rank` among the G."""
        return slice(self.first[rank], self.first[rank + 1])

    def picks_on(self, rank: int) -> torch.Tensor:
        """int64 [num_rows(rank)]: the pick g * top_k + k in each row of `rank`; -1: padding."""
        picks = torch.full((self.num_rows(rank),), -1, device=self.slot.device)
        here = (self.destination.reshape(-1) == rank).nonzero().squeeze(1)
        picks[self.slot.reshape(-1)[here]] = here
        return picks


def routes_of(
    topk_idx: list[torch.Tensor],
    num_experts: int,
    alignment: int,
    sources: list[int] | None = None,
) -> Routes:
    """Give every pick its row.

    Args:
        topk_idx: of each rank, int64 [num_tokens, top_k], -1 where a pick goes nowhere.
        num_experts: E; rank r of R holds experts r * E / R to (r + 1) * E / R - 1.
        alignment: rows of a block are padded to a multiple of it.
        sources: in which order ranks' rows stand in a block; default: upwards.
    """
    num_ranks = len(topk_idx)
    sizes = [len(mine) for mine in topk_idx]
    first = [sum(sizes[:rank]) for rank in range(num_ranks + 1)]
    expert = torch.cat(topk_idx)
    device = expert.device
    flat = expert.reshape(-1)

    # Tokens are in the order (source rank, token) already: stable sorts keep it.
    pick = (flat >= 0).nonzero().squeeze(1)
    source = torch.repeat_interleave(
        torch.arange(num_ranks, device=device), torch.tensor(sizes, device=device)
    )
    if sources is not None:
        place = torch.tensor(sources, device=device).argsort()[source]
        pick = pick[place[pick // expert.shape[1]].argsort(stable=True)]
    pick = pick[flat[pick].argsort(stable=True)]
    routed = flat[pick].bincount(minlength=num_experts)
    padded = -(-routed // alignment) * alignment
    by_rank = padded.view(num_ranks, -1)
    block = (by_rank.cumsum(1) - by_rank).reshape(-1)  # where each expert's rows start
    turn = torch.arange(len(pick), device=device) - (routed.cumsum(0) - routed)[flat[pick]]
    slot = torch.full_like(flat, -1)
    slot[pick] = block[flat[pick]] + turn
    return Routes(
        num_experts=num_experts,
        expert=expert,
        slot=slot.view_as(expert),
        source=source,
        first=first,
        routed=routed.view(num_ranks, -1),
        padded=by_rank,
    )


def wire_rows(routes: Routes) -> int:
    """Rows that the busiest rank must send or receive, whichever is more.

    A token's row crosses the wire once for each other rank that has an expert of it, however many
    of its experts are there.

    Example: two ranks with two experts each, top-2.  Rank 0's token 0 picks experts 2 and 3: one
    row from rank 0 to rank 1.  Its token 1 picks 0 and 1: none.  Rank 1's token 0 picks 1 and 2:
    one row from rank 1 to rank 0.  Every rank sends one row and receives one: the answer is 1.
    """
    R = routes.num_ranks
    crossing = torch.zeros(R, R, dtype=torch.int64)
    destination = routes.destination
    for rank in range(R):
        goes_there = (destination == rank).any(dim=1)
        crossing[:, rank] = routes.source[goes_there].bincount(minlength=R).cpu()
    crossing.fill_diagonal_(0)
    return int(torch.maximum(crossing.sum(dim=1), crossing.sum(dim=0)).max())
