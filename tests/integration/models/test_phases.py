"""Two models in a process that hands its memory over between steps, as reinforcement learning does
for a generator, and takes it back: weights have other addresses then, or other values.

verl and NeMo-RL free and refill the storages of Megatron's buffers, and replace frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from adam_training import Training
from rank_pool import RankContext
from trainer import ModelCase, Results, differences

import megatron_ncclep
from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

STEPS = 3
EXACT = EpConfig(engine="reference", experts="grouped")
CASE = ModelCase(dtype=torch.float32, ep=4, micro_batches=1)


class Frozen(Training):
    """Some weights of its experts are frozen, as those that adapters are added to."""

    def _change(self, chunk: Any) -> None:
        super()._change(chunk)
        for name, parameter in chunk.named_parameters():
            if "experts.linear_fc1" in name:
                parameter.requires_grad = False


def offloaded(training: Training) -> Callable[[], None]:
    """Do what frameworks do with a model's weights and gradients between two phases; the result
    takes them back.
    """
    (model,) = training.wrapped
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    kept = [(b, b.param_data.clone(), b.grad_data.nbytes) for b in buffers]
    for buffer in buffers:
        buffer.param_data.untyped_storage().resize_(0)
        buffer.grad_data.untyped_storage().resize_(0)
    # A generator's, which now has the addresses.
    theirs = [torch.full_like(values, torch.nan) for _, values, _ in kept]

    def load() -> None:
        for buffer, values, bytes_of_gradients in kept:
            buffer.param_data.untyped_storage().resize_(values.nbytes)
            buffer.param_data.copy_(values)
            buffer.grad_data.untyped_storage().resize_(bytes_of_gradients)
            buffer.grad_data.zero_()
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.clone()
        theirs.clear()

    return load


def results_of(ctx: RankContext, has_phases: bool) -> Results:
    """Losses and all that is left of both; the second gets a router of the first, in place."""
    options = {
        Training: replace(EXACT, max_recv_rows="1.3x", on_overflow="rerun"),
        Frozen: EXACT,
    }
    models = [
        kind(ctx, "ncclep", replace(CASE, options={"ncclep": options[kind]})) for kind in options
    ]
    results: Results = {}
    for step in range(STEPS):
        for number, model in enumerate(models):
            results[f"losses {number} {step}"] = model.gradients(step)
            model.optimizer.step()
            if has_phases:
                megatron_ncclep.release_memory()
                for load in [offloaded(each) for each in models]:
                    load()
        first, second = (model.chunks[0].decoder.layers[0].mlp.router.weight for model in models)
        with torch.no_grad():
            second.copy_(first)
    for number, model in enumerate(models):
        results |= {f"{number} {name}": value for name, value in model.everything().items()}
    return results


@pytest.mark.supports(
    "memory given back between phases",
    compared="losses, weights and the optimizer's state with those without phases, to the bit",
)
def test_bits(ctx: RankContext) -> None:
    assert differences(results_of(ctx, has_phases=True), results_of(ctx, has_phases=False)) == []
