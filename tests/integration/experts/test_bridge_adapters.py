"""Megatron-Bridge's own adapters on experts, where it is installed (`pip install --no-deps
megatron-bridge`, hydra-core): test_adapters.py has stand-ins for them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from adapted_experts import change
from changed_experts import Change
from installed_bridge import PACKAGE, import_lora, needs_bridge, without_init
from rank_pool import RankContext
from test_adapters import compare
from torch import nn

RANK, NORMAL = 4, "normal"


def put_on(layer: Any, seen: Any, **options: Any) -> None:
    """Have Megatron-Bridge freeze a model and put adapters on its experts."""
    lora = importlib.import_module(f"{PACKAGE}.peft.lora")
    model = nn.Module()
    model.mlp = layer
    linears = ["linear_fc1", "linear_fc2"]
    lora.LoRA(linears, dim=RANK, alpha=6, lora_B_init_method=NORMAL, **options)(model)


def around(kind: str, linear: nn.Module, name: str, config: Any) -> nn.Module:
    """An adapter of TEGroupedMLP, as `LoRA` makes it; without TransformerEngine that fails."""
    utils = importlib.import_module(f"{PACKAGE}.peft.utils")
    layers = importlib.import_module(f"{PACKAGE}.peft.lora_layers")
    weights = list(linear.parameters())
    (out, into), dtype = weights[0].shape, weights[0].dtype
    more: dict[str, Any] = {"num_local_experts": len(weights), "params_dtype": dtype}
    if kind == "ParallelLinearAdapter":
        more = {"is_expert": True}
    adapter = getattr(utils, kind)(
        into,
        out,
        RANK,
        base_linear_name=f"mlp.experts.{name}",
        activation="identity",
        row_init_method=NORMAL,
        input_is_parallel=name == "linear_fc2",
        model_parallel_config=config,
        alpha=6,
        **more,
    )
    return layers.LoRALinear(linear, adapter)


@needs_bridge
def test_local_experts(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_init(patch)
        import_lora()
        for options in ({}, {"normalize_moe_lora": True}):
            adapted = Change(lambda layer, seen, o=options: put_on(layer, seen, **o))
            compare(ctx, False, adapted, torch.float64)


@needs_bridge
@pytest.mark.parametrize(
    "kind",
    ["ParallelLinearAdapter", "GroupedExpertLinearAdapter", "SharedOuterGroupedExpertAdapter"],
)
def test_one_module_for_all_experts(ctx: RankContext, kind: str) -> None:
    # torch's grouped_mm, which the last one calls, has no fp64.
    dtype = torch.float32 if kind.startswith("Shared") else torch.float64
    with pytest.MonkeyPatch.context() as patch:
        without_init(patch)
        import_lora()
        make = lambda *args: around(kind, *args)  # noqa: E731
        compare(ctx, True, change(make), dtype)
