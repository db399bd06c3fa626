"""Megatron-Bridge's own adapters on Megatron's experts, where it is installed (`pip install
--no-deps megatron-bridge`, hydra-core); test_adapters.py has stand-ins for them.

tests/gpu/test_gpu_adapters.py has those of TransformerEngine's experts.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from changed_experts import Change
from installed_bridge import PACKAGE, import_lora, needs_bridge, without_init
from rank_pool import RankContext
from test_adapters import compare
from torch import nn


def put_on(layer: Any, seen: Any, **options: Any) -> None:
    """Have Megatron-Bridge freeze a model and put adapters on its experts."""
    lora = importlib.import_module(f"{PACKAGE}.peft.lora")
    model = nn.Module()
    model.mlp = layer
    linears = ["linear_fc1", "linear_fc2"]
    lora.LoRA(linears, dim=4, alpha=6, lora_B_init_method="normal", **options)(model)


@needs_bridge
def test_local_experts(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_init(patch)
        import_lora()
        for options in ({}, {"normalize_moe_lora": True}):
            adapted = Change(lambda layer, seen, o=options: put_on(layer, seen, **o))
            compare(ctx, False, adapted)
