"""Layers of experts with adapters, as libraries put them there: a table of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from adapter_libraries import (
    GroupedExpertLinearAdapter,
    LoRALinear,
    LoraParallelLinear,
    ParallelLinearAdapter,
    SharedOuterGroupedExpertAdapter,
    TEGroupedLinear,
)
from changed_experts import Change, Seen, copy_experts
from megatron_setup import make_experts_differ, moe_submodules
from torch import nn

BOTH = ("linear_fc1", "linear_fc2")


def build_grouped(config: Any, device: str, te: bool) -> Any:
    """As `build_layer`, with Megatron's TEGroupedMLP over stand-ins for TransformerEngine."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts: Any = SimpleNamespace(
        linear_fc1=TEGroupedLinear, linear_fc2=TEGroupedLinear, activation_func=None
    )
    spec = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False
    )
    submodules = moe_submodules(spec)
    of_spec = isinstance(submodules.experts, ModuleSpec)
    experts = ModuleSpec(TEGroupedMLP, submodules=parts) if of_spec else None
    submodules.experts = experts or partial(TEGroupedMLP, submodules=parts)
    layer = MoELayer(config, submodules=submodules, layer_number=1)
    layer.set_layer_number(1)
    make_experts_differ(layer)
    return layer.to(device, config.params_dtype)


def holders(layer: Any) -> list[Any]:
    """The modules that have linear_fc1 and linear_fc2: the experts, or each of them."""
    return list(getattr(layer.experts, "local_experts", [layer.experts]))


def wrap(
    layer: Any,
    seen: Seen,
    make: Callable[[nn.Module, str, Any], nn.Module],
    linears: tuple[str, ...] = BOTH,
    frozen: bool = True,
) -> None:
    """Put a wrapper around these linears of all experts, each with other random numbers."""
    from megatron.core import parallel_state

    torch.manual_seed(5 + parallel_state.get_expert_model_parallel_rank())
    for weight in layer.experts.parameters():
        weight.requires_grad_(not frozen)
    for holder in holders(layer):
        for name in linears:
            setattr(holder, name, make(getattr(holder, name), name, layer.config))


def of_bridge(kind: str, **more: Any) -> Callable[[nn.Module, str, Any], nn.Module]:
    """Megatron-Bridge's adapter "of one", "shared", "of each" or "half shared"."""

    def make(linear: nn.Module, name: str, config: Any) -> nn.Module:
        number, weight = sum(1 for _ in linear.parameters()), next(linear.parameters())
        adapter: nn.Module
        if kind == "of each":
            adapter = GroupedExpertLinearAdapter(number, weight, config, **more)
        elif kind == "half shared":
            is_fc1 = name == "linear_fc1"
            adapter = SharedOuterGroupedExpertAdapter(number, weight, config, is_fc1, **more)
        else:
            adapter = ParallelLinearAdapter(weight, config, kind == "shared", **more)
        return LoRALinear(linear, adapter)

    return make


def of_swift(names: tuple[str, ...] = ("one",)) -> Callable[[nn.Module, str, Any], nn.Module]:
    return lambda linear, name, config: LoraParallelLinear(linear, config, names)


def set_all(layer: Any, **values: Any) -> None:
    """Set attributes of all wrappers."""
    for holder in holders(layer):
        for name in BOTH:
            for attribute, value in values.items():
                setattr(getattr(holder, name), attribute, value)


def merge(layer: Any) -> None:
    """As mcore-bridge does: the adapter becomes part of the weights, which get other memory."""
    for holder in holders(layer):
        for name in BOTH:
            wrapper = getattr(holder, name)
            a, b = wrapper.lora_A["one"].parameters(), wrapper.lora_B["one"].parameters()
            for weight, into, out in zip(wrapper.base_layer.parameters(), a, b, strict=True):
                weight.data = weight.data + 0.5 * (out @ into).detach()
            wrapper.merged_adapters.append("one")


def unwrap(layer: Any) -> None:
    for holder in holders(layer):
        for name in BOTH:
            setattr(holder, name, getattr(holder, name).to_wrap)


def train_more(layer: Any) -> None:
    set_all(layer, _active_adapter=["one", "two"])


def change(
    make: Any, later: Any = None, after_ddp: bool = False, fuses: bool = True, **more: Any
) -> Change:
    """A row; Megatron's linears, of which some adapters are made, fuse with Apex only."""
    return Change(partial(wrap, make=make, **more), after_ddp=after_ddp, later=later, fuses=fuses)


# Name -> the layer has one module for all experts, as on a GPU; and what is done to it.
ADAPTED: dict[str, tuple[bool, Change]] = {
    "of one": (False, change(of_bridge("of one"))),
    "of one, after DDP": (False, change(of_bridge("of one"), after_ddp=True)),
    "trained": (False, change(of_bridge("of one"), frozen=False)),
    "shared": (True, change(of_bridge("shared"), fuses=False)),
    "shared, trained": (True, change(of_bridge("shared"), fuses=False, frozen=False)),
    "of each": (True, change(of_bridge("of each"))),
    "of each, trained": (True, change(of_bridge("of each"), frozen=False)),
    "half shared": (True, change(of_bridge("half shared"), fuses=False)),
    "fc1": (True, change(of_bridge("of each"), linears=("linear_fc1",))),
    "fc2": (True, change(of_bridge("of each"), linears=("linear_fc2",))),
    "switched off": (
        True,
        change(of_bridge("of each"), partial(set_all, _adapter_enabled=False)),
    ),
    "taken away": (True, change(of_bridge("of each"), unwrap)),
    "copied": (True, change(of_bridge("of each"), lambda layer: copy_experts(layer, []))),
    "several": (True, change(of_swift(("one", "two")), train_more)),
    "merged": (True, change(of_swift(), merge)),
    "another": (
        True,
        change(of_swift(("one", "two")), partial(set_all, _active_adapter="two")),
    ),
    "none active": (True, change(of_swift(), partial(set_all, _disable_adapters=True))),
}


def drop(rows: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any) -> torch.Tensor:
    """Dropout whose choice depends on the values' fractions, so that it is the same in any order of
    rows, and before and after a multiplication by 2.
    """
    fractions, _ = torch.frexp(rows.detach().double())
    kept = (1e6 * fractions).floor().remainder(7) / 7 >= p
    return rows * kept / (1 - p) if training else rows


def dropped() -> Any:
    """Have `drop` in place of torch's dropout."""
    return mock.patch.object(torch.nn.functional, "dropout", drop)
