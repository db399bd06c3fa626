"""Static mode for an engine that cannot drop in the contract's order: the source rank drops first.

The contract takes assignments in the order (source rank, token, local expert) and counts the
blocks of `alignment` rows that they open; the first that does not fit and all after it are
dropped.  How many blocks the lower source ranks open follows from how many assignments each of
them has for each expert, so every rank can tell for itself which of its own assignments fit.

Example: alignment 2, room for 4 rows, one rank with two experts.  Source 0 has 3 assignments for
    expert
0, which open 2 blocks: the room is full.  Source 1's assignment for expert 0 fills the second
block, but it is kept only if no assignment before it had to open a third.
"""

from __future__ import annotations

import torch

from megatron_ncclep.engines.engine import NOT_ROUTED


def drop_what_does_not_fit(
    topk_idx: torch.Tensor, counts: torch.Tensor, rank: int, alignment: int, max_recv_rows: int
) -> torch.Tensor:
    """Replace assignments that overflow their destination rank by `NOT_ROUTED`.  Not collective.

    Args:
        topk_idx: [num_tokens, top_k] int64 of this rank.
        counts: [num_ranks, num_experts] int64 on the CPU: assignments of every rank for every
            expert.
        rank: this rank.
        alignment: rows of an alignment block.
        max_recv_rows: rows that each destination rank has room for.

    Returns:
        [num_tokens, top_k] int64.
    """
    num_ranks, num_experts = counts.shape
    num_tokens, num_local = len(topk_idx), num_experts // num_ranks
    before = counts[:rank].sum(dim=0)
    blocks_before = ((before + alignment - 1) // alignment).view(num_ranks, -1).sum(dim=1)

    # One column more than there are experts takes what is not routed.
    routed = topk_idx.new_zeros(num_tokens, num_experts + 1, dtype=torch.bool)
    column = torch.where(topk_idx == NOT_ROUTED, num_experts, topk_idx)
    routed = routed.scatter(1, column, True)[:, :num_experts]
    # Of an assignment in its expert's block.
    place = before.to(topk_idx.device) + routed.cumsum(dim=0) - 1
    opens = routed & (place % alignment == 0)
    # For each destination, in the order (token, local expert).
    opens = opens.view(num_tokens, num_ranks, num_local).transpose(0, 1)
    opened = opens.reshape(num_ranks, num_tokens * num_local).cumsum(dim=1)
    blocks = blocks_before.to(topk_idx.device)[:, None] + opened
    fits = blocks * alignment <= max_recv_rows
    fits = fits.view(num_ranks, num_tokens, num_local).transpose(0, 1)
    assignments_fit = fits.reshape(num_tokens, num_experts).gather(1, topk_idx.clamp(min=0))
    return torch.where(assignments_fit, topk_idx, NOT_ROUTED)


def rows_needed(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Rows that every rank needs if nothing is dropped, padding included.  Not collective.

    Args:
        counts: [num_ranks, num_experts] int64: assignments of every rank for every expert.
        alignment: rows of an alignment block.

    Returns:
        int64 [num_ranks].
    """
    blocks = (counts.sum(dim=0) + alignment - 1) // alignment
    return blocks.view(len(counts), -1).sum(dim=1) * alignment
