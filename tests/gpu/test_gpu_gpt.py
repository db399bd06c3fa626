"""Whole trainings of a GPTModel over several ranks, with every engine: `alltoall`'s losses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from gpt_training import Layout, Training
from schedule_case import differences, train_on_schedule
from test_checkpoints import losses_on_rank
from test_pipeline import OPTIONS

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext, RankPool

needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="TransformerEngine, whose layers are trained, is not installed",
)

STEPS = 6
# Both add the same two numbers for each token, but gradients of weights in another order of rows:
# fp32 (6e-8 a rounding), and Adam's first steps divide by gradients' sizes.  A step's loss moves by
# 1e-2 or more.
SAME = 2e-4


def losses_of(
    ctx: RankContext, dispatcher: str, engine_name: str, layout: Layout, options: dict[str, Any]
) -> list[float]:
    options = {**options, "ncclep": EpConfig(engine=engine_name, experts="megatron")}
    training = Training(options, 0, dispatcher, layout, device=ctx.device)
    return [training.step()[0] for _ in range(STEPS)]


def layouts(num_ranks: int) -> list[Layout]:
    """How so many ranks can share experts: as one group, as two, with slices of experts."""
    found = [Layout(ep=num_ranks)]
    if num_ranks > 2:
        found.append(Layout(ep=num_ranks // 2))
        found.append(Layout(ep=num_ranks // 2, tp=2, etp=2))
    return found


@needs_te
@pytest.mark.needs_ranks(2)
@pytest.mark.supports(
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    compared="losses of a GPTModel with Megatron's DDP and distributed optimizer with alltoall's, "
    "2e-4 (fp32, Adam)",
)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_training_has_the_losses_of_alltoall(
    megatron_pool: RankPool, engine_name: str, recompute: bool
) -> None:
    options: dict[str, Any] = {}
    if recompute:
        options = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    for layout in layouts(megatron_pool.size):
        ours, theirs = (
            megatron_pool.run(losses_of, dispatcher, engine_name, layout, options)
            for dispatcher in ("ncclep", "alltoall")
        )
        assert ours[0][-1] < ours[0][0] - 0.1
        for mine, expected in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(expected, rel=SAME), layout


def pipeline_differences(ctx: RankContext, engine_name: str) -> list[str]:
    ep = ctx.num_ranks // 2
    ours, theirs = (
        train_on_schedule(
            ctx,
            dispatcher,
            ep,
            {**OPTIONS, "ncclep": EpConfig(engine=engine_name, experts="megatron")},
            num_micro_batches=4,
            pp=2,
        )
        for dispatcher in ("ncclep", "alltoall")
    )
    return differences(ours, theirs)


@pytest.mark.needs_ranks(4)
@pytest.mark.supports(
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    compared="losses and all gradients with alltoall's, to the bit (one assignment a token)",
)
def test_pipeline_stages_give_alltoalls_bits(megatron_pool: RankPool, engine_name: str) -> None:
    found = megatron_pool.run(pipeline_differences, engine_name)
    assert found == [[]] * megatron_pool.size


@needs_te
@pytest.mark.needs_ranks(4)
@pytest.mark.supports(
    "ckpt_format=torch_dist",
    compared="losses after a change of dispatcher and of both kinds of expert parallelism with an "
    "uninterrupted run's, 2e-4 (fp32, Adam)",
)
def test_a_run_goes_on_in_another_layout(
    megatron_pool: RankPool, engine_name: str, tmp_path: Path
) -> None:
    if megatron_pool.size != 4:
        pytest.skip("its layouts are for four ranks")
    options = {"ncclep": EpConfig(engine=engine_name, experts="megatron")}
    for losses, expected in megatron_pool.run(losses_on_rank, tmp_path, options):
        assert expected[-1] < expected[0] - 0.2
        assert losses == pytest.approx(expected, rel=SAME)
