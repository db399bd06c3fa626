"""Rows of more than 2^31 elements: what counts in 32 bits goes wrong here."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from compare import assert_same_bits
from contract_cases import deadline_s
from rank_pool import RankContext, RankPool
from run_case import Tables

from megatron_ncclep.benchmark.contents import rows_of, weights_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import EngineCaps

# 16 assignments of two ranks' tokens, on average half of them for each rank: 8.6 GB of rows, and
# for the comparison three times that.
NUM_RANKS, NUM_EXPERTS, TOP_K = 2, 32, 8
NUM_TOKENS, HIDDEN, DTYPE = 65536, 8192, torch.bfloat16
PIECE = 2**15  # rows that are compared at once
# Of the tensors of a rank.
GIB_OF_A_RANK = 45


def takes_so_many(caps: EngineCaps) -> bool:
    return caps.max_tokens is None or caps.max_tokens >= NUM_TOKENS


def steps_on_rank(
    ctx: RankContext, engine_name: str, num_tokens: int, hidden: int
) -> tuple[str, int]:
    """Dispatch and combine; return the first difference from the oracle, and the rows received."""
    ranks, rank, device = range(ctx.num_ranks), ctx.rank, ctx.device
    tokens = [num_tokens - r for r in ranks]
    generator = torch.Generator(device).manual_seed(0)
    topk_idx = [
        torch.rand(count, NUM_EXPERTS, generator=generator, device=device).topk(TOP_K).indices
        for count in tokens
    ]
    tables = Tables(engine_name, topk_idx, NUM_EXPERTS)
    num_rows = tables.num_rows[rank]
    x = [rows_of(r, tokens[r], hidden, DTYPE, 1, device) for r in ranks]
    w = [weights_of(r, (tokens[r], TOP_K), 1, device) for r in ranks]
    y = [rows_of(r, tables.num_rows[r], hidden, DTYPE, 2, device) for r in ranks]
    row_w = [weights_of(r, (tables.num_rows[r],), 2, device) for r in ranks]
    config = EpConfig(engine=engine_name, timeout_s=deadline_s(engine_name, device))
    with closing(create_engine(ctx.group, NUM_EXPERTS, config)) as engine:
        plan = engine.plan(topk_idx[rank])
        rows, weights = engine.dispatch(plan, x[rank], w[rank])
        out, values = engine.combine(plan, y[rank], row_w[rank])
    try:
        assert len(rows) == num_rows
        for first in range(0, num_rows, PIECE):
            piece, what = slice(first, first + PIECE), f"rank {rank}, from row {first} on"
            expected, expected_w = tables.dispatch(rank, x, w, piece)
            assert_same_bits(rows[piece], expected, f"{what}: rows")
            assert_same_bits(weights[piece], expected_w, f"{what}: weights")
        expected, expected_w = tables.combine(rank, y, row_w)
        assert_same_bits(out, expected, f"rank {rank}: sums")
        assert_same_bits(values, expected_w, f"rank {rank}: values")
    except AssertionError as error:
        return str(error), num_rows
    return "", num_rows


@pytest.mark.needs_gib(GIB_OF_A_RANK)
@pytest.mark.needs_ranks(NUM_RANKS)
@pytest.mark.needs_caps(test=takes_so_many)
def test_more_elements_than_32_bits_count(pool: RankPool, engine_name: str) -> None:
    # The pool's processes would keep what they have allocated.
    pool.close()
    results = pool.run(steps_on_rank, engine_name, NUM_TOKENS, HIDDEN, ranks=NUM_RANKS)
    pool.close()
    for difference, num_rows in results:
        assert not difference
        assert num_rows * HIDDEN > 2**31
