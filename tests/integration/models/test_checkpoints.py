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


def parts(num_ranks: int) -> list[tuple[str, dict[str, int]]]:
    """Before the checkpoint and after it: whole experts, and then slices of twice as many."""
    slices = {"ep": num_ranks // 2, "tp": 2, "etp": 2}
    return [("alltoall", {"ep": num_ranks, "tp": 2}), ("ncclep", slices)]


@checkpoints_written()
def assert_goes_on(ctx: RankContext, folder: Path, options: dict[str, Any]) -> None:
    """Compare the losses of a run in the parts above with one that goes on as the first part does.

    `options`: fields of TransformerConfig.
    """
    from megatron.core import dist_checkpointing

    def build(part: int, seed: int) -> Training:
        # Megatron's distributed optimizer does not load torch's Adam in another layout (KeyError:
        # 'step'), with any dispatcher; the fused ones need a GPU.
        dispatcher, layout = parts(ctx.num_ranks)[part]
        te = {"te": ctx.device == "cuda", "grouped_gemm": False}  # torch's norms: no sequence parts
        case = ModelCase("", dict(options), dtype=torch.float32, **te, **layout)
        return Training(ctx, dispatcher, case, seed, distributed=False)

    first = build(part=0, seed=0)
    losses = [first.step()[0] for _ in range(STEPS)]
    dist_checkpointing.save(first.state(is_loading=False), str(folder))
    expected = losses + [first.step()[0] for _ in range(STEPS)]
    second = build(part=1, seed=1)
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
