"""Adapters on experts: grouped ones gave a layer with any adapter to Megatron's experts, so that
those who fine-tune with LoRA had none of their speed, and no CUDA graphs of the experts.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from adam_training import SAME, Training
from adapted_experts import ADAPTED, build_grouped, change, dropped, of_bridge
from changed_experts import Change, train
from megatron_setup import build_layer
from rank_pool import RankContext
from torch_products import TorchProducts
from trainer import ModelCase

from megatron_ncclep.config import EpConfig
from megatron_ncclep.integration.experts import expert_stack

FIELDS: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "bias_activation_fusion": True,
}
# The same padding, so that Megatron's experts multiply the same rows.
THEIRS = EpConfig(experts="megatron", alignment=16)
# Of the largest value.  Products are scaled, added up and rounded in other places: sums of at most
# 32 terms, and in bf16 up to ten roundings of 2^-9 on the way to a gradient.
CLOSE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def compare(
    ctx: RankContext, is_one: bool, adapted: Change, dtype: torch.dtype, **ours: Any
) -> None:
    """Two micro-batches beside Megatron's experts, in exact and static mode; none falls back.

    `is_one`: the layer has one module for all experts; `ours`: fields of the config of grouped
    experts.
    """
    build = build_grouped if is_one else build_layer
    fields = {**FIELDS, "build": build, "dtype": dtype}
    expected, _, _ = train(adapted, THEIRS, "cpu", False, ctx.rank, **fields)
    parts = ("linear_in", "linear_out", "lora_A", "lora_B")
    for part in parts:
        of_part = [v for key, v in expected.items() if part in key and v is not None]
        assert not of_part or any(value.any() for value in of_part), part
    for room in (None, 256):
        options = EpConfig(experts="grouped", max_recv_rows=room)
        found, _, said = train(adapted, options, "cpu", False, ctx.rank, **fields, **ours)
        assert not any("Megatron's experts compute" in line for line in said)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if value is None or found[key] is None:
                assert value is found[key] is None, key
                continue
            error = (found[key].double() - value.double()).abs().max()
            assert error <= CLOSE[dtype] * value.double().abs().max(), (key, room)


@pytest.mark.each_release
@pytest.mark.supports(
    "adapters on grouped experts",
    compared="outputs and all gradients with Megatron's experts, 1e-13 (fp64)",
)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters(ctx: RankContext, name: str) -> None:
    compare(ctx, *ADAPTED[name], torch.float64)


@pytest.mark.each_release
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["trained", "shared", "of each"])
def test_other_dtypes(ctx: RankContext, name: str, dtype: torch.dtype) -> None:
    compare(ctx, *ADAPTED[name], dtype)


@pytest.mark.each_release
@pytest.mark.parametrize("name", ADAPTED)
def test_as_part_of_one_node(ctx: RankContext, name: str) -> None:
    """With quack-kernels the experts and their adapters are one node of autograd; torch computes
    its products here.  Frozen weights of fc2 have room for a factor.
    """
    from megatron_ncclep.integration.experts import fused_swiglu, grouped

    products = {"_has_products": True, "_products": TorchProducts()}
    is_one, adapted = ADAPTED[name]
    rooms: list[int] = []

    def with_room(weights: Any, room: int) -> Any:
        rooms.append(room)
        return expert_stack.with_room(weights, room)

    with (
        mock.patch.multiple(grouped.GroupedExperts, **products),
        mock.patch.object(grouped, "add_adapter", wraps=grouped.add_adapter) as apart,
        mock.patch.object(fused_swiglu, "with_room", with_room),
    ):
        compare(ctx, is_one, adapted, torch.float64)
    assert bool(apart.call_count) == (name == "several")
    is_frozen = not name.endswith(("trained", "after DDP"))
    assert all((room > 0) == is_frozen for room in rooms)
    assert name != "of each" or rooms


@pytest.mark.each_release
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("kind", ["of one", "of each"])
def test_dropout(ctx: RankContext, kind: str, position: str) -> None:
    adapted = change(of_bridge(kind, dropout=0.3, dropout_position=position))
    with dropped():
        compare(ctx, kind == "of each", adapted, torch.float64)


@pytest.mark.each_release
@pytest.mark.parametrize("name", ["of each", "shared, trained"])
def test_recomputed_activations(ctx: RankContext, name: str) -> None:
    """The rows of linear_fc2, which its adapters need too, are made again in backward.  Megatron's
    are kept: on a CPU it does not make them again.
    """
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    fields = {**recomputed, "moe_grouped_gemm": True}  # Megatron wants it for moe_act
    from megatron_ncclep.integration.experts import grouped

    with mock.patch.object(grouped, "activate", wraps=grouped.activate) as activate:
        compare(ctx, *ADAPTED[name], torch.float64, **fields)
    # In four forward passes, for the gradients of adapters, and of weights that are not frozen.
    assert activate.call_count == 4 * (2 + name.endswith("trained"))


def test_weights_that_are_still_on_their_way(ctx: RankContext) -> None:
    """With overlap_param_gather a hook of DDP's on each module waits for its weights; those of
    adapters would be the last step's.
    """
    called: list[str] = []

    def change_layer(layer: Any, seen: Any) -> None:
        ADAPTED["shared"][1].make(layer, seen)
        for name, module in layer.experts.named_modules():
            if module._parameters:
                hook = lambda module, inputs, name=name: called.append(name)  # noqa: E731
                hook.__qualname__ = "DistributedDataParallel._make_forward_pre_hook.<locals>.hook"
                module.register_forward_pre_hook(hook)

    options = {"build": build_grouped, **FIELDS}
    train(Change(change_layer), EpConfig(experts="grouped"), "cpu", False, ctx.rank, **options)
    parts = ("to_wrap", "adapter.linear_in", "adapter.linear_out")
    once = [f"linear_{fc}.{part}" for fc in ("fc1", "fc2") for part in parts]
    assert sorted(called) == sorted(2 * once)


class FineTuning(Training):
    """A model whose experts are frozen and have adapters."""

    def _change(self, chunk: Any) -> None:
        super()._change(chunk)
        for layer in chunk.decoder.layers:
            ADAPTED["of one"][1].make(layer.mlp, [])


def test_fine_tuning(ctx: RankContext) -> None:
    """With the distributed optimizer and all overlaps, losses are those of Megatron's experts."""
    curves = {}
    for experts in ("megatron", "grouped"):
        options = {"ncclep": EpConfig(experts=experts), **FIELDS}
        training = FineTuning(ctx, "ncclep", ModelCase(experts, options, dtype=torch.float32))
        curves[experts] = [training.step() for _ in range(4)]
    expected = curves["megatron"]
    assert expected[-1][0] < expected[0][0]
    assert curves["grouped"] == [pytest.approx(step, rel=SAME["cpu"]) for step in expected]
