"""A run goes on from a checkpoint with another dispatcher and another layout of the experts.

Megatron's distributed checkpoints name experts and the parts of their weights by their place in the
whole model, so that ranks that hold others can read them.  What the dispatcher adds is in none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpt_training import Layout, Training, checkpoints_written

from megatron_ncclep.ranks.pool import RankContext, RankPool

pytestmark = pytest.mark.each_release

STEPS = 3  # of each part
# Before the checkpoint and after it: two experts on each rank, and then slices of four.
PARTS = [("alltoall", Layout(ep=4, tp=2)), ("ncclep", Layout(ep=2, tp=2, etp=2))]


@checkpoints_written()
def losses_on_rank(
    ctx: RankContext, folder: Path, options: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Losses of a run in the parts above, and of one that goes on as the first part does.

    `options`: fields of TransformerConfig.
    """
    from megatron.core import dist_checkpointing

    def build(part: int, seed: int) -> Training:
        # Megatron's distributed optimizer does not load torch's Adam in another layout (KeyError:
        # 'step'), with any dispatcher; the fused ones need a GPU.
        return Training(dict(options), seed, *PARTS[part], distributed=False, device=ctx.device)

    first = build(part=0, seed=0)
    losses = [first.step()[0] for _ in range(STEPS)]
    dist_checkpointing.save(first.state(is_loading=False), str(folder))
    expected = losses + [first.step()[0] for _ in range(STEPS)]
    second = build(part=1, seed=1)
    second.load(folder)
    losses += [second.step()[0] for _ in range(STEPS)]
    return losses, expected


@pytest.mark.supports(
    "ckpt_format=torch_dist",
    compared="losses after a change of dispatcher and of both kinds of expert parallelism with an "
    "uninterrupted run's, 2e-4 (fp32, Adam)",
)
def test_a_run_goes_on_in_another_layout(megatron_pool: RankPool, tmp_path: Path) -> None:
    for losses, expected in megatron_pool.run(losses_on_rank, tmp_path, {}):
        assert expected[-1] < expected[0] - 0.2
        # fp32 (6e-8 a rounding) in another order of sums; Adam's first steps divide by gradients'
        # sizes, so that an error of 1e-6 stays one.  A step's loss moves by 1e-2 or more.
        assert losses == pytest.approx(expected, rel=2e-4)
