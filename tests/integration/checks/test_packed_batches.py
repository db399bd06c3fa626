"""Static mode with packed sequences: other numbers of tokens on each rank, in each micro-batch.

Fine-tuning and reinforcement learning pack sequences of 1k to 32k tokens.  In static mode they had
to be padded until all ranks had equally many, or the first plan was an InputError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from adam_training import Training
from megatron_setup import EXPERTS, HIDDEN, build_layer, initialize, make_config
from on_ranks import gathered
from rank_pool import RankContext
from test_reruns import watched_limits
from trainer import ModelCase, Results, differences

from megatron_ncclep.config import EpConfig
from megatron_ncclep.integration.rerun import limit

pytestmark = pytest.mark.each_release

MOST = 30
EXACT = EpConfig(engine="reference", experts="grouped")
# Of packed sequences, by step, micro-batch and rank: from one token to the most.
LENGTHS = (
    (((3, 2), (7,), (1, 1, 1), (4, 9)), ((1,), (1,), (1,), (1,))),
    (((12, 1, 17), (2, 2), (1,), (5,)), ((30,), (30,), (10, 20), (30,))),
    (((1,), (9, 8, 7, 6), (20,), (3, 3)), ((2,), (4,), (28,), (6, 1))),
    (((10,), (11,), (12,), (13,)), ((5, 5), (30,), (1, 2), (3,))),
)
CASE = ModelCase(dtype=torch.float32, ep=4, lengths=((),))


class Ragged(Training):
    """A training with the batches of `LENGTHS`."""

    def batches(self, seed: int, length: int) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(1000 * seed + self.replica)
        return [self._packed(lengths[self.rank], generator) for lengths in LENGTHS[seed]]


def results_of(ctx: RankContext, options: EpConfig) -> tuple[Results, int]:
    """Losses, gradients and all that the training leaves; the number of steps that were rerun."""
    training = Ragged(ctx, "ncclep", replace(CASE, options={"ncclep": options}))
    results: Results = {}
    for step in range(len(LENGTHS)):
        results[f"losses {step}"] = training.gradients(step)
        for name, parameter in training.chunks[0].named_parameters():
            results[f"gradient {step} of {name}"] = parameter.main_grad.clone()
        training.optimizer.step()
    reruns = getattr(training.wrapped[0], "_ncclep_reruns", None)
    return {**results, **training.everything()}, getattr(reruns, "num_reruns", 0)


@pytest.mark.supports(
    "--ncclep-max-tokens-per-rank",
    compared="losses and gradients of packed sequences with those of exact mode, to the bit",
)
def test_bits(ctx: RankContext) -> None:
    expected, _ = results_of(ctx, EXACT)
    for rows, overflow, least in (
        ("worst", "drop", 0),
        ("3x", "raise", 0),
        ("0.9x", "rerun", 1),
        ("auto", "rerun", 0),
    ):
        options = {"max_recv_rows": rows, "on_overflow": overflow, "max_tokens_per_rank": MOST}
        with mock.patch.object(limit, "WINDOW", 2), watched_limits() as follow:
            found, num_reruns = results_of(ctx, replace(EXACT, **options))
        seen = [call.args[1] for call in follow.call_args_list]
        assert (problems := differences(found, expected)) == [], (rows, problems)
        assert least <= num_reruns < len(LENGTHS)
        # Most batches have far fewer than the most tokens: the limit becomes less than a balanced
        # load of those.
        assert (0 < min(seen, default=0) < 1000) == (rows == "auto"), (rows, seen)
        assert gathered(ctx, (num_reruns, seen)) == [(num_reruns, seen)] * 4


def test_a_part_of_the_declared_tokens(ctx: RankContext) -> None:
    """Whose longest batch is rare had to make room for it, or to have steps run again: a factor
    below 1x was refused with 'drop', as if every batch had the most tokens.
    """
    initialize(4)
    half = replace(EXACT, max_recv_rows="0.5x", max_tokens_per_rank=40)
    exact, layer = (
        build_layer(make_config("ncclep", torch.float32, 4, ncclep=options))
        for options in (EXACT, half)
    )
    layer.load_state_dict(exact.state_dict())
    hidden = torch.randn(5, 1, HIDDEN, generator=torch.Generator().manual_seed(ctx.rank))
    assert torch.equal(layer(hidden)[0], exact(hidden)[0])


def test_padding_that_is_not_routed(ctx: RankContext) -> None:
    """In a CUDA graph a batch has a fixed number of tokens.  Those after the end of the real ones
    take no rows and no part of a link where the router's map has no expert for them.
    """
    initialize(4)
    options = replace(EXACT, max_recv_rows="worst", metrics_interval=10**6)
    layer = build_layer(make_config("ncclep", torch.float32, 4, ncclep=options))
    number = 5 * ctx.rank  # of real tokens; rank 0 has none
    hidden = torch.randn(MOST, 1, HIDDEN, generator=torch.Generator().manual_seed(ctx.rank))
    is_padding = torch.arange(MOST) >= number
    seen = {}
    for name in ("routed", "not routed"):
        tokens = hidden.clone().requires_grad_()
        routing = layer.router.routing

        def masked(*args: Any, routing: Any = routing, **kwargs: Any) -> Any:
            probs, routing_map = routing(*args, **kwargs)
            keep = ~is_padding[:, None]
            return probs * keep, routing_map & keep

        with mock.patch.object(layer.router, "routing", masked if "not" in name else routing):
            out, _ = layer(tokens)
            out[:number].sum().backward()
        assert tokens.grad is not None
        sent = layer.token_dispatcher._counts.sent.clone()
        layer.token_dispatcher._counts.take()
        seen[name] = out[:number].detach(), tokens.grad[:number], sent
        if "not" in name:
            assert not out[number:].any()
            assert int(sent.sum()) <= 2 * number < EXPERTS * MOST
    for routed, not_routed in zip(seen["routed"][:2], seen["not routed"][:2], strict=True):
        assert torch.equal(routed, not_routed)
