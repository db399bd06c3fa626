"""A run goes on from a checkpoint with another dispatcher and another layout of the experts.

Megatron's distributed checkpoints name experts and the parts of their weights by their place in the
whole model, so that ranks that hold others can read them.  What the dispatcher adds is in none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adam_training import SAME, Training, checkpoints_written
from rank_pool import RankContext
from trainer import ModelCase

pytestmark = pytest.mark.each_release

STEPS = 3  # of each part


@checkpoints_written()
def assert_goes_on(ctx: RankContext, folder: Path, options: dict[str, Any]) -> None:
    """Compare the losses of a run in two parts with one that goes on as the first part does.

    `options`: fields of TransformerConfig.
    """

    def build(dispatcher: str, seed: int, **layout: int) -> Training:
        # Megatron's distributed optimizer does not load torch's Adam in another layout (KeyError:
        # 'step'), with any dispatcher; the fused ones need a GPU.
        te = {"te": ctx.device == "cuda", "grouped_gemm": False}  # torch's norms: no sequence parts
        case = ModelCase("", dict(options), dtype=torch.float32, tp=2, **te, **layout)
        return Training(ctx, dispatcher, case, seed, distributed=False)

    # Whole experts, and then slices of twice as many.
    first = build("alltoall", seed=0, ep=ctx.num_ranks)
    losses = [first.step()[0] for _ in range(STEPS)]
    first.save(folder)
    expected = losses + [first.step()[0] for _ in range(STEPS)]
    second = build("ncclep", seed=1, ep=ctx.num_ranks // 2, etp=2)
    second.load(folder)
    losses += [second.step()[0] for _ in range(STEPS)]
    assert expected[-1] < expected[0] - 0.2
    assert losses == pytest.approx(expected, rel=SAME[ctx.device])


@pytest.mark.supports(
    "ckpt_format=torch_dist",
    compared="losses after a change of dispatcher and of both kinds of expert parallelism with an "
    "uninterrupted run's, 2e-6 (fp32, Adam)",
)
def test_a_run_goes_on_in_another_layout(ctx: RankContext, tmp_path: Path) -> None:
    assert_goes_on(ctx, tmp_path, {})
