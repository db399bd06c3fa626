"""Batches of one token to 32k on each rank, other numbers in each micro-batch, in static mode.

Small ones are in tests/contract/test_ragged_batches.py and
tests/integration/checks/test_packed_batches.py, graphs of them in test_graphs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_bits
from megatron_setup import build_layer, ep_config, initialize, make_config
from rank_pool import RankContext

import megatron_ncclep

pytestmark = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)

MOST = 32768
# Of each rank, by micro-batch.
TOKENS = (
    (1024, 32768, 7, 5000),
    (20000, 1, 12345, 4096),
    (32768, 32768, 32768, 32768),
    (1, 1, 1, 1),
    (3, 2048, 30000, 32768),
)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_ffn_hidden_size": 64,
    "num_moe_experts": 16,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": False,
    "moe_grouped_gemm": True,
    "use_cpu_initialization": False,
}


def results_of(ctx: RankContext, engine_name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a layer, by name."""
    initialize(ctx.num_ranks, device="cuda")
    ncclep = ep_config(engine_name, experts="grouped", **options)
    config = make_config("ncclep", torch.bfloat16, ctx.num_ranks, **SIZES, ncclep=ncclep)
    layer = build_layer(config, device="cuda")
    generator = torch.Generator("cuda").manual_seed(ctx.rank)
    found: dict[str, torch.Tensor] = {}
    for number, tokens in enumerate(TOKENS):
        shape = (tokens[ctx.rank % len(tokens)], 1, config.hidden_size)
        x, grad = (
            torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(2)
        )
        out, _ = layer(x.requires_grad_())
        out.backward(grad)
        assert x.grad is not None
        found |= {f"output {number}": out.detach(), f"gradient {number}": x.grad}
        megatron_ncclep.check()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        found[f"gradient of {name}"] = parameter.grad
    return found


def test_long_batches(ctx: RankContext, engine_name: str) -> None:
    """Outputs and gradients are those of exact mode, to the bit."""
    expected = results_of(ctx, engine_name)
    found = results_of(ctx, engine_name, max_recv_rows="worst", max_tokens_per_rank=MOST)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_same_bits(value, expected[name], name)
