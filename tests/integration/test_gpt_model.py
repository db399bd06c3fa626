"""A whole GPTModel with our dispatcher: the loss curve is alltoall's, whatever is recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_setup import EXPERTS, initialize, make_config, make_experts_differ

from megatron_ncclep.testing.launcher import RankContext, RankPool

VOCABULARY, SEQUENCE, BATCH, STEPS = 48, 12, 2, 6

RECOMPUTE = {
    "nothing": {},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full-uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "full-block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
}


def losses_on_rank(ctx: RankContext, dispatcher: str, options: dict[str, Any]) -> list[float]:
    """Plain SGD over two micro-batches a step, gradients averaged as Megatron's DDP would."""
    initialize(ep=2)
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = make_config(dispatcher, torch.float64, 2, **options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    ).double()
    make_experts_differ(model)
    data = torch.Generator().manual_seed(ctx.rank)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH, SEQUENCE + 1), generator=data)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        total = 0.0
        for micro_batch in tokens:
            loss = model(
                micro_batch[:, :-1], positions, mask, labels=micro_batch[:, 1:].contiguous()
            ).mean()
            loss.backward()
            total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                is_expert = ".experts." in name
                group = (
                    parallel_state.get_expert_data_parallel_group()
                    if is_expert
                    else parallel_state.get_data_parallel_group()
                )
                torch.distributed.all_reduce(parameter.grad, group=group)
                parameter -= 0.05 * parameter.grad
    return losses


@pytest.mark.parametrize("name", RECOMPUTE)
def test_loss_curve_is_alltoalls(megatron_pool: RankPool, name: str) -> None:
    ours = megatron_pool.run(losses_on_rank, "ncclep", RECOMPUTE[name])
    theirs = megatron_pool.run(losses_on_rank, "alltoall", RECOMPUTE[name])
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[-1] < mine[0] - 0.1
        # fp64: two summation orders differ by ~1e-16 a step; a wrong gradient by far more.
        assert mine == pytest.approx(other, rel=1e-9)
