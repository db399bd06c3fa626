"""A whole GPTModel with our dispatcher: losses and gradients are alltoall's, to the bit, whatever
is recomputed; how often a recomputed dispatch is planned; and a pipeline.

Two assignments, so two terms: no sum depends on the order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import gathered
from trainer import Model, ModelCase, differences, train

from megatron_ncclep.ranks.pool import RankContext

pytestmark = pytest.mark.each_release


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": 1,
    }


# What is computed again in backward, and the plans that a micro-batch then makes, of all layers.
RECOMPUTE = {
    "nothing": ({}, 2),
    # The norm's output, which dispatch reads, is freed and computed again.
    "moe": (selective("moe", "layernorm"), 4),
    "older-name": ({"moe_layer_recompute": True}, 4),
    # A dense layer before one of experts.
    "around-the-dispatch": (
        {
            **selective("core_attn", "layernorm", "mlp", "shared_experts"),
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 32,
        },
        1,
    ),
    "full-uniform": (full("uniform"), 4),
    "full-block": (full("block"), 3),  # the first layer only
}


def log_engine_calls(calls: list[str], model: Model) -> None:
    """Have every call of an engine written down, with its layer."""

    def call(name: str, original: Any, *args: Any) -> Any:
        calls.append(name)
        return original(*args)

    for index, layer in enumerate(model.chunks[0].decoder.layers):
        if not hasattr(layer.mlp, "token_dispatcher"):
            continue  # a dense layer
        engine = layer.mlp.token_dispatcher.engine
        for step in ("plan", "dispatch", "combine"):
            setattr(engine, step, partial(call, f"{step} {index}", getattr(engine, step)))


@pytest.mark.supports(
    compared="losses and gradients of a training with alltoall's, to the bit; the order of what is "
    "collective, on all ranks; how often a plan is made"
)
@pytest.mark.parametrize(
    ("case", "plans"),
    [
        pytest.param(ModelCase(name, options, evaluates=False), plans, id=name)
        for name, (options, plans) in RECOMPUTE.items()
    ],
)
def test_training_is_alltoalls(ctx: RankContext, case: ModelCase, plans: int) -> None:
    calls: list[str] = []
    ours = train(ctx, "ncclep", case, partial(log_engine_calls, calls))
    # Recomputation changes no bit.
    kept = {name: value for name, value in case.options.items() if "recompute" not in name}
    assert differences(ours, train(ctx, "alltoall", replace(case, options=kept))) == []
    # What is collective comes in one order on all ranks; a recomputed dispatch is planned again.
    assert gathered(ctx, calls) == [calls] * ctx.num_ranks
    num_plans, dispatches, combines = (
        sum(call.startswith(step) for call in calls) for step in ("plan", "dispatch", "combine")
    )
    passes = case.steps * case.micro_batches
    assert num_plans == plans * passes
    # The backward of a combine is a dispatch, and the other way round.
    num_layers = len({call.split()[1] for call in calls})
    assert dispatches == combines == num_plans + num_layers * passes


# One assignment a token: a sum of one row is the same in every order.
STAGES = ModelCase(
    "pipeline",
    {"moe_router_topk": 1, "moe_router_pre_softmax": True, "deallocate_pipeline_outputs": True},
    dtype=torch.bfloat16,
    pp=2,
    micro_batches=4,
)


@pytest.mark.supports(
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "overlap_p2p_comm",
    "deallocate_pipeline_outputs",
    compared="losses and all gradients with alltoall's, to the bit (one assignment a token)",
)
def test_virtual_stages_give_alltoalls_bits(ctx: RankContext) -> None:
    """Losses of pretrain_gpt.py with virtual stages and Megatron-Core 0.16.1 were up to 0.094 from
    those of `alltoall`, and those of `alltoall` as far from its own, or NaN.  It freed activations
    that gloo was still sending: Megatron's schedule, whatever the dispatcher, before 0.18.
    """
    assert differences(*(train(ctx, kind, STAGES) for kind in ("ncclep", "alltoall"))) == []
