"""Whole trainings of a GPTModel over several ranks, with every engine: `alltoall`'s losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adam_training import SAME, Training
from deselect import needs_te
from megatron_setup import ep_config
from rank_pool import RankContext
from test_checkpoints import assert_goes_on
from test_gpt_model import STAGES
from trainer import ModelCase, differences, train

STEPS = 6


def layouts(num_ranks: int) -> list[dict[str, int]]:
    """How so many ranks can share experts: as one group, as two, with slices of experts."""
    found = [{"ep": num_ranks}]
    if num_ranks > 2:
        found.append({"ep": num_ranks // 2})
        found.append({"ep": num_ranks // 2, "tp": 2, "etp": 2})
    return found


@needs_te
@pytest.mark.needs_ranks(2)
@pytest.mark.supports(
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    compared="losses of a GPTModel with Megatron's DDP and distributed optimizer with alltoall's, "
    "1e-4 (fp32, Adam)",
)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_training_has_the_losses_of_alltoall(
    ctx: RankContext, engine_name: str, recompute: bool
) -> None:
    options: dict[str, Any] = {"ncclep": ep_config(engine_name)}
    if recompute:
        options |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    for layout in layouts(ctx.num_ranks):
        case = ModelCase("", options, dtype=torch.float32, te=True, grouped_gemm=False, **layout)
        losses = []
        for dispatcher in ("ncclep", "alltoall"):
            training = Training(ctx, dispatcher, case)
            losses.append([training.step()[0] for _ in range(STEPS)])
        ours, theirs = losses
        assert ours[-1] < ours[0] - 0.1
        # Both add the same two numbers for each token, but gradients of weights in another order of
        # rows.
        assert ours == pytest.approx(theirs, rel=SAME[ctx.device]), layout


@pytest.mark.needs_ranks(4)
@pytest.mark.supports(
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    compared="losses and all gradients with alltoall's, to the bit (one assignment a token)",
)
def test_pipeline_stages_give_alltoalls_bits(ctx: RankContext, engine_name: str) -> None:
    options = {**STAGES.options, "ncclep": ep_config(engine_name)}
    case = replace(STAGES, options=options, ep=ctx.num_ranks // 2)
    assert differences(*(train(ctx, kind, case) for kind in ("ncclep", "alltoall"))) == []


@needs_te
@pytest.mark.needs_ranks(4)
@pytest.mark.supports(
    "ckpt_format=torch_dist",
    compared="losses after a change of dispatcher and of both kinds of expert parallelism with an "
    "uninterrupted run's, 1e-4 (fp32, Adam)",
)
def test_a_run_goes_on_in_another_layout(
    ctx: RankContext, engine_name: str, tmp_path: Path
) -> None:
    assert_goes_on(ctx, tmp_path, {"ncclep": ep_config(engine_name)})
