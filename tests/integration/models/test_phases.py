"""Two models in a process that hands its memory over between steps, as reinforcement learning does
for a generator, and takes it back: weights have other addresses then, or other values.

verl and NeMo-RL free and refill the storages of Megatron's buffers, and replace frozen weights.
"""

from __future__ import annotations

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


class Offloaded:
    """What frameworks do with a model's weights and gradients between two phases."""

    def __init__(self, training: Training) -> None:
        (self._model,) = training.wrapped
        buffers = [*self._model.buffers, *self._model.expert_parallel_buffers]
        self._kept = [(b, b.param_data.clone(), b.grad_data.numel()) for b in buffers]
        for buffer in buffers:
            buffer.param_data.untyped_storage().resize_(0)
            buffer.grad_data.untyped_storage().resize_(0)
        # A generator's, which now has the addresses.
        self._theirs = [torch.full_like(values, torch.nan) for _, values, _ in self._kept]

    def load(self) -> None:
        for buffer, values, num_gradients in self._kept:
            buffer.param_data.untyped_storage().resize_(values.nbytes)
            buffer.param_data.copy_(values)
            gradients = buffer.grad_data
            gradients.untyped_storage().resize_(num_gradients * gradients.itemsize)
            gradients.zero_()
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.clone()


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
                offloaded = [Offloaded(each) for each in models]
                for each in offloaded:
                    each.load()
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
    expected = results_of(ctx, has_phases=False)
    found = results_of(ctx, has_phases=True)
    assert differences(found, expected) == []
