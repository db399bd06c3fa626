"""A whole GPTModel with our dispatcher: the losses and weights are alltoall's, to the bit, whatever
is recomputed; and what a recomputed dispatch costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from layer_case import options_shown
from megatron_setup import initialize, make_config, make_experts_differ

from megatron_ncclep.ranks.pool import RankContext, RankPool

pytestmark = pytest.mark.each_release

VOCABULARY, SEQUENCE, BATCH, STEPS, MICRO_BATCHES = 48, 12, 2, 4, 2


@dataclass(frozen=True)
class Recompute:
    """What is computed again in backward.

    Attributes:
        name: of it.
        options: TransformerConfig fields.
        plans: that a micro-batch makes, of all layers.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    plans: int = 4

    def __str__(self) -> str:
        return self.name

    def options_shown(self) -> list[str]:
        return options_shown(self.options)


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": 1,
    }


CASES = [
    Recompute("nothing", plans=2),
    # The norm's output, which dispatch reads, is freed and computed again.
    Recompute("moe", selective("moe", "layernorm")),
    Recompute("older-name", {"moe_layer_recompute": True}),
    # A dense layer before one of experts.
    Recompute(
        "around-the-dispatch",
        {
            **selective("core_attn", "layernorm", "mlp", "shared_experts"),
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 32,
        },
        plans=1,
    ),
    Recompute("full-uniform", full("uniform")),
    Recompute("full-block", full("block"), plans=3),  # the first layer only
]


@contextmanager
def outputs_discarded_without_te() -> Iterator[None]:
    """Let Megatron discard outputs and compute them again on a CPU.

    It asks TransformerEngine, which is not there, whether FP8 is on, also where nobody uses it.
    """
    from megatron.core.tensor_parallel import random

    state = SimpleNamespace(is_fp8_enabled=lambda: False)
    names = {"FP8GlobalStateManager": state}
    names |= dict.fromkeys(
        ("activation_recompute_forward", "fp8_autocast"), lambda **_: nullcontext()
    )
    with mock.patch.multiple(random, create=True, **names):
        yield


def train_on_rank(
    ctx: RankContext, dispatcher: str, options: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Plain SGD over two micro-batches a step, gradients averaged as Megatron's DDP would.

    Returns losses and weights by name, and the engines' calls of the first step in their order.
    """
    initialize(ep=2)
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = make_config(dispatcher, torch.float64, 2, **options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    ).double()
    make_experts_differ(model)
    calls: list[str] = []
    if dispatcher == "ncclep":
        _log_calls(model, calls)
    data = torch.Generator().manual_seed(ctx.rank)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES, BATCH, SEQUENCE + 1), generator=data)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    results: dict[str, Any] = {"losses": []}
    of_first_step: list[str] = []
    for _ in range(STEPS):
        model.zero_grad()
        total = 0.0
        for batch in tokens:
            with outputs_discarded_without_te():
                losses = model(batch[:, :-1], positions, mask, labels=batch[:, 1:].contiguous())
                losses.mean().backward()
            total += losses.mean().item()
        results["losses"].append(total)
        of_first_step = of_first_step or list(calls)
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
    return {**results, **dict(model.named_parameters())}, of_first_step


def _log_calls(model: Any, calls: list[str]) -> None:
    """Have every call of an engine written down, with its layer."""

    def call(name: str, original: Any, *args: Any) -> Any:
        calls.append(name)
        return original(*args)

    for index, layer in enumerate(model.decoder.layers):
        if not hasattr(layer.mlp, "token_dispatcher"):
            continue  # a dense layer
        engine = layer.mlp.token_dispatcher.engine
        for step in ("plan", "dispatch", "combine"):
            setattr(engine, step, partial(call, f"{step} {index}", getattr(engine, step)))


@pytest.fixture(scope="module")
def alltoall(megatron_pool: RankPool) -> Callable[[dict[str, Any]], list[Any]]:
    """What `alltoall` trains without recomputation, which changes no bit: once for all cases."""
    known: dict[str, list[Any]] = {}

    def results(options: dict[str, Any]) -> list[Any]:
        kept = {name: value for name, value in options.items() if "recompute" not in name}
        if str(kept) not in known:
            known[str(kept)] = megatron_pool.run(train_on_rank, "alltoall", kept)
        return known[str(kept)]

    return results


@pytest.mark.supports(
    compared="losses and weights of a training with alltoall's, to the bit; the order of what is "
    "collective, on all ranks; how often a plan is made"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_alltoalls(
    megatron_pool: RankPool, alltoall: Callable[..., list[Any]], case: Recompute
) -> None:
    """Two assignments, so two terms: no sum depends on the order."""
    ours = megatron_pool.run(train_on_rank, "ncclep", case.options)
    first_calls = ours[0][1]
    for (mine, calls), (other, _) in zip(ours, alltoall(case.options), strict=True):
        losses = mine["losses"]
        assert losses == other["losses"]
        assert losses[-1] < losses[0] - 0.1
        assert mine.keys() == other.keys()
        weights = mine.keys() - {"losses"}
        assert [name for name in weights if not torch.equal(mine[name], other[name])] == []
        # What is collective comes in one order on all ranks; a recomputed dispatch is planned anew.
        assert calls == first_calls
        plans, dispatches, combines = (
            sum(call.startswith(step) for call in calls) for step in ("plan", "dispatch", "combine")
        )
        assert plans == case.plans * MICRO_BATCHES
        # The backward of a combine is a dispatch, and the other way round.
        without_recompute = 2 - (case.name == "around-the-dispatch")
        assert dispatches == combines == plans + without_recompute * MICRO_BATCHES
