"""Static mode: how many rows the dispatched tensor has, for each way to say it.

    max_recv_rows   assignments that always fit, however the rank's experts share them
    4096            (4096 rows, whatever arrives)
    "worst"         R * T * min(K, L): every token of every rank sends all it can to one rank
    "1.25x"         1.25 * T * K, rounded up: a balanced load is T * K assignments for each rank

with R ranks, T tokens on each, K assignments of a token and L experts of a rank.  N assignments
need most rows when each of min(L, N) experts has one assignment in an alignment block (of
`alignment` rows) of its own, and only then do others fill blocks: min(L, N) + (N - min(L, N)) //
alignment blocks, at least one.

With experts in S slices (expert_slices.py) K counts the S copies of each assignment, of which a
rank gets one: a balanced load is T * K assignments as ever, and the worst case has
min(K / S, L).

Example: 4 ranks of 8 tokens, top-2, 3 experts each, alignment 16.  The worst case is 4 * 8 * 2 = 64
assignments: 3 + 61 // 16 = 6 blocks, 96 rows.  "1.25x": 20 assignments, 3 + 17 // 16 = 4
blocks, 64 rows.
"""

from __future__ import annotations

from megatron_ncclep.config import MAX_COUNT, WORST, EpConfig, thousandths


def rows_limit(
    config: EpConfig,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    ranks_per_expert: int = 1,
) -> int | None:
    """How many rows every dispatched tensor has; None in exact mode.  Not collective.

    The same on all ranks when they bring the same number of tokens, on which they agree.

    Args:
        config: options of the engine.
        num_ranks: R.
        num_tokens: T, of this call.
        top_k: K, columns of topk_idx.
        num_local_experts: L.
        ranks_per_expert: each assignment comes in so many copies, every one for another rank.

    Returns:
        a multiple of the alignment, at most the 2^31 - 1 rows that a row number can name.
    """
    rows, alignment = config.max_recv_rows, config.block_alignment
    if not isinstance(rows, str):
        return rows
    num_assignments = num_ranks * num_tokens * min(top_k // ranks_per_expert, num_local_experts)
    if rows != WORST:
        factor = thousandths(rows)
        assert factor is not None, "EpConfig has checked it"
        num_assignments = min(num_assignments, -(-num_tokens * top_k * factor // 1000))
    opened = min(num_local_experts, num_assignments)
    num_blocks = max(1, opened + (num_assignments - opened) // alignment)
    return min(num_blocks, MAX_COUNT // alignment) * alignment


def can_drop(config: EpConfig) -> bool:
    """Whether anything may not fit: not in exact mode, nor with room for all that can come."""
    return config.max_recv_rows not in (None, WORST)
