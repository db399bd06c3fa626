"""Batches whose rows and weights name their assignment, so that no oracle is needed to check them.

For batches that are too large for one.
"""

from __future__ import annotations

from typing import Any

import torch
from rank_pool import RankContext

from megatron_ncclep.engines.engine import Engine

MOST_TOKENS, MOST_EXPERTS = 32768, 64  # so that all numbers are exact for up to 8 ranks


def named_rows(rank: int, num_tokens: int, hidden: int, device: str) -> torch.Tensor:
    """[num_tokens, hidden] bf16: the rank, the token by two numbers, and the second again."""
    token = torch.arange(num_tokens, device=device)
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    x[:, 0], x[:, 1], x[:, 2:] = rank, token // 256, (token % 256)[:, None]
    return x


def named_weights(rank: Any, token: Any, expert: torch.Tensor) -> torch.Tensor:
    """An fp32 number for each assignment."""
    return (rank * MOST_TOKENS + token + expert / MOST_EXPERTS).float()


def assert_both_steps(
    engine: Engine, ctx: RankContext, topk_idx: torch.Tensor, hidden: int
) -> torch.Tensor:
    """Plan, dispatch and combine a batch without padding or dropped assignments; collective.

    Every row that arrives says which weight belongs to it; a token gets back its row, times top-k,
    and its weights.

    Returns:
        the rows that arrived.
    """
    num_tokens, top_k = topk_idx.shape
    on_rank = engine.num_experts // ctx.num_ranks
    x = named_rows(ctx.rank, num_tokens, hidden, ctx.device)
    tokens = torch.arange(num_tokens, device=ctx.device)
    w = named_weights(ctx.rank, tokens[:, None], topk_idx)
    plan = engine.plan(topk_idx)
    rows, row_w = engine.dispatch(plan, x, w)
    assert row_w is not None
    counts = plan.tokens_per_expert.to(ctx.device)
    expert = torch.arange(on_rank, device=ctx.device).repeat_interleave(counts)
    token = rows[:, 1].float() * 256 + rows[:, 2].float()
    assert torch.equal(row_w, named_weights(rows[:, 0].float(), token, expert + on_rank * ctx.rank))
    assert torch.equal(rows[:, 2:], rows[:, 2:3].expand(-1, hidden - 2))
    out, topk_w = engine.combine(plan, rows, row_w)
    assert torch.equal(out, top_k * x)
    assert topk_w is not None
    assert torch.equal(topk_w, w)
    return rows
