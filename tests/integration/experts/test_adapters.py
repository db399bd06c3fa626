"""Adapters on experts: grouped ones gave a layer with any adapter to Megatron's experts, so that
those who fine-tune with LoRA had none of their speed, and no CUDA graphs of the experts.

Most adapters are stand-ins for those of the libraries.  Where Megatron-Bridge is installed (`pip
install --no-deps megatron-bridge`, hydra-core), its own are tested on Megatron's experts; those on
TransformerEngine's are in tests/gpu/test_gpu_adapters.py.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from adam_training import SAME, Training
from adapted_experts import ADAPTED, change, of_bridge, wrap
from adapter_libraries import TEGroupedLinear
from changed_experts import THEIRS, Change, copy_experts, train
from installed_bridge import PACKAGE, import_lora, needs_bridge, without_init
from megatron_setup import HIDDEN, SWIGLU, build_layer, initialize, make_config, selective
from rank_pool import RankContext
from torch_products import TorchProducts
from trainer import ModelCase, differences

from megatron_ncclep.config import EpConfig
from megatron_ncclep.integration.experts import expert_stack

GROUPED = EpConfig(experts="grouped")
# In fp64, of the largest value: products are scaled and added up in other places, sums of 32 terms
# at most.  test_grouped_linear.py has the other dtypes.
CLOSE = 1e-13
# quack-kernels' products, which torch computes here.
PRODUCTS = {"_has_products": True, "_products": TorchProducts()}


def compare(ctx: RankContext, is_one: bool, adapted: Change, **ours: Any) -> None:
    """Two micro-batches beside Megatron's experts, in exact and static mode; none falls back.

    `is_one`: the layer has one module for all experts; `ours`: fields of the config of grouped
    experts.
    """
    fields = {**SWIGLU, "linears": TEGroupedLinear if is_one else None, "dtype": torch.float64}
    expected, _, _ = train(adapted, THEIRS, "cpu", False, ctx.rank, **fields)
    parts = ("linear_in", "linear_out", "lora_A", "lora_B")
    for part in parts:
        of_part = [v for key, v in expected.items() if part in key and v is not None]
        assert not of_part or any(value.any() for value in of_part), part
    for room in (None, 256):
        options = EpConfig(experts="grouped", max_recv_rows=room)
        found, _, said = train(adapted, options, "cpu", False, ctx.rank, **fields, **ours)
        assert not any("Megatron's experts compute" in line for line in said)
        problems = differences(found, expected, CLOSE, least=0.0)
        # An adapter that was taken away has no gradients to show.
        assert not {*problems} - {"no expert was trained"}, (room, problems)


@pytest.mark.each_release
@pytest.mark.supports(
    "adapters on grouped experts",
    compared="outputs and all gradients with Megatron's experts, 1e-13 (fp64)",
)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters(ctx: RankContext, name: str) -> None:
    compare(ctx, *ADAPTED[name])


@pytest.mark.each_release
@pytest.mark.parametrize("name", ADAPTED)
def test_as_part_of_one_node(ctx: RankContext, name: str) -> None:
    """With quack-kernels the experts and their adapters are one node of autograd.  Frozen weights
    of fc2 have room for a factor.
    """
    from megatron_ncclep.integration.experts import fused_swiglu, grouped

    with (
        mock.patch.multiple(grouped.GroupedExperts, **PRODUCTS),
        mock.patch.object(grouped, "add_adapter", wraps=grouped.add_adapter) as apart,
        mock.patch.object(fused_swiglu, "with_room", wraps=expert_stack.with_room) as with_room,
    ):
        compare(ctx, *ADAPTED[name])
    assert bool(apart.call_count) == (name == "several")
    is_frozen = not name.endswith(("trained", "after DDP"))
    rooms = [room for _, room in (call.args for call in with_room.call_args_list)]
    assert all((room > 0) == is_frozen for room in rooms)
    assert name != "of each" or rooms


def test_where_room_comes_later(ctx: RankContext) -> None:
    """Experts that were frozen after a first pass, and a copy of those that a CUDA graph holds, got
    no room for a factor, so that every backward pass copied all weights of fc2.
    """
    from megatron_ncclep.integration.experts import grouped

    initialize(ep=ctx.num_ranks)
    config = make_config("ncclep", torch.float32, ctx.num_ranks, ncclep=GROUPED, **SWIGLU)
    layer = build_layer(config, linears=TEGroupedLinear)
    wrap(layer, [], of_bridge("of each"), frozen=False)
    number = layer.experts.num_local_experts
    rows, counts, probs = torch.ones(number, HIDDEN), torch.ones(number).int(), torch.ones(number)

    def room_of() -> Any:
        assert layer.experts.as_built.change() is None
        layer.experts(rows, counts, probs)
        return expert_stack.with_room(layer.experts.weights_of("linear_fc2"), 4)

    with mock.patch.multiple(grouped.GroupedExperts, **PRODUCTS):
        assert room_of() is None
        for linear in layer.experts.as_built.linears.values():
            linear[0].requires_grad_(False)
        on_a_gpu = mock.patch.object(torch.Tensor, "is_cuda", True)
        in_a_graph = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
        with on_a_gpu, in_a_graph:
            assert room_of() is None
        assert room_of() is None  # the graph holds where they are
        original = layer.experts
        copy_experts(layer, [])
        assert room_of() is not None
        layer.experts, original._in_graph = original, ()
        assert room_of() is not None


def drop(rows: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any) -> torch.Tensor:
    """Dropout whose choice depends on the values' fractions, so that it is the same in any order of
    rows, and before and after a multiplication by 2.
    """
    fractions, _ = torch.frexp(rows.detach().double())
    kept = (1e6 * fractions).floor().remainder(7) / 7 >= p
    return rows * kept / (1 - p) if training else rows


@pytest.mark.each_release
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("kind", ["of one", "of each"])
def test_dropout(ctx: RankContext, kind: str, position: str) -> None:
    adapted = change(of_bridge(kind, dropout=0.3, dropout_position=position))
    with mock.patch.object(torch.nn.functional, "dropout", drop):
        compare(ctx, kind == "of each", adapted)


@pytest.mark.each_release
@pytest.mark.parametrize("name", ["of each", "shared, trained"])
def test_recomputed_activations(ctx: RankContext, name: str) -> None:
    """The rows of linear_fc2, which its adapters need too, are made again in backward.  Megatron's
    are kept: on a CPU it does not make them again.
    """
    fields = {**selective("moe_act"), "moe_grouped_gemm": True}  # Megatron wants it for moe_act
    from megatron_ncclep.integration.experts import grouped

    with mock.patch.object(grouped, "activate", wraps=grouped.activate) as activate:
        compare(ctx, *ADAPTED[name], **fields)
    # In four forward passes, for the gradients of adapters, and of weights that are not frozen.
    assert activate.call_count == 4 * (2 + name.endswith("trained"))


class FineTuning(Training):
    """A model whose experts are frozen and have adapters."""

    def _change(self, chunk: Any) -> None:
        super()._change(chunk)
        for layer in chunk.decoder.layers:
            ADAPTED["of one"][1].make(layer.mlp, [])


def test_fine_tuning(ctx: RankContext) -> None:
    """With the distributed optimizer and all overlaps, losses are those of Megatron's experts.

    With overlap_param_gather a hook of DDP's on each module waits for its weights; those of
    adapters would be the last step's.
    """
    curves = {}
    for experts in ("megatron", "grouped"):
        options = {"ncclep": EpConfig(experts=experts), **SWIGLU}
        training = FineTuning(ctx, "ncclep", ModelCase(experts, options, dtype=torch.float32))
        curves[experts] = [training.step() for _ in range(4)]
    expected = curves["megatron"]
    assert expected[-1][0] < expected[0][0]
    assert curves["grouped"] == [pytest.approx(step, rel=SAME["cpu"]) for step in expected]


def put_on(layer: Any, seen: Any, **options: Any) -> None:
    """Have Megatron-Bridge freeze a model and put adapters on its experts."""
    lora = importlib.import_module(f"{PACKAGE}.peft.lora")
    model = torch.nn.Module()
    model.mlp = layer
    linears = ["linear_fc1", "linear_fc2"]
    lora.LoRA(linears, dim=4, alpha=6, lora_B_init_method="normal", **options)(model)


@needs_bridge
def test_megatron_bridge(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_init(patch)
        import_lora()
        for options in ({}, {"normalize_moe_lora": True}):
            adapted = Change(lambda layer, seen, o=options: put_on(layer, seen, **o))
            compare(ctx, False, adapted)
