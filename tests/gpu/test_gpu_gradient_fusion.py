"""The benchmark's stand-in for Apex' function on a GPU: sums in fp32, added to main_grad."""

from __future__ import annotations

import torch
from rank_pool import RankContext

from benchmarks.training_model import wgrad_gemm_accum_fp32

# Neither 301 nor multiples of it are bf16 numbers, which are 2 apart from 256 on.
ROWS, IN, OUT, TIMES = 301, 24, 40, 3


def test_sums_are_fp32(ctx: RankContext) -> None:
    rows, grad = (
        torch.ones(ROWS, width, device="cuda", dtype=torch.bfloat16) for width in (IN, OUT)
    )
    rows[:, 1], grad[:, 2] = 2, -3
    main_grad = torch.full((OUT, IN), 0.5, device="cuda")
    for _ in range(TIMES):
        wgrad_gemm_accum_fp32(rows, grad, main_grad)
    expected = torch.full((OUT, IN), float(ROWS * TIMES))
    expected[:, 1] *= 2
    expected[2] *= -3
    assert torch.equal(main_grad.cpu(), expected + 0.5)
