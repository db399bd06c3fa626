"""A long training on many ranks in a CUDA graph, in which rows do not fit at times."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from graph_training import SEQUENCE, train
from on_ranks import gathered
from rank_pool import RankContext
from test_megatron_graphs import FULL, RERUN
from trainer import differences

pytestmark = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)

JOB = dataclasses.replace(
    FULL,
    name="reruns",
    ncclep=RERUN,
    # The router learns nothing from random tokens, and must not learn to prefer some experts.
    options={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    eval_sequence=SEQUENCE,
    collapses=range(10, 200, 20),
    steps=200,
)


@pytest.mark.supports(
    "--ncclep-on-overflow=rerun",
    "--ncclep-max-recv-rows=auto",
    compared="losses, gradients and weights with those of exact mode, to the bit",
)
@pytest.mark.needs_ranks(4)
@pytest.mark.limit_s(500)
@pytest.mark.parametrize("rows", ["2.5x", "auto"])
def test_long_training(ctx: RankContext, engine_name: str, rows: str) -> None:
    """Every bit is that of exact mode without graphs, and few steps were run again.

    In ten steps, and the evaluations after them, the first two experts get all tokens.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.cuda.set_stream(torch.cuda.Stream())
    job = dataclasses.replace(JOB, ncclep={**RERUN, "max_recv_rows": rows})
    exact = train(ctx, engine_name, job, with_graphs=False)
    graphed = train(ctx, engine_name, job, with_graphs=True)
    assert (problems := differences(graphed.values, exact.values)) == [], problems[:9]
    reruns = graphed.training.model._ncclep_reruns
    assert reruns.num_steps == 2 * JOB.steps
    if rows == "auto":
        assert 1 <= reruns.num_reruns <= 60
        assert reruns.limit.factor > 2500
    else:
        assert 20 <= reruns.num_reruns <= 60, reruns.num_reruns
    assert gathered(ctx, reruns.num_reruns) == [reruns.num_reruns] * ctx.num_ranks
