"""Layers of experts with adapters, as libraries put them there: a table of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from adapter_libraries import (
    GroupedExpertLinearAdapter,
    LoRALinear,
    LoraParallelLinear,
    ParallelLinearAdapter,
    SharedOuterGroupedExpertAdapter,
)
from changed_experts import Change, Seen, copy_experts
from torch import nn

BOTH = ("linear_fc1", "linear_fc2")


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


def set_all(layer: Any, **values: Any) -> None:
    """Set attributes of all wrappers."""
    for holder in holders(layer):
        for name in BOTH:
            for attribute, value in values.items():
                setattr(getattr(holder, name), attribute, value)


def merge(layer: Any) -> None:
    """As mcore-bridge does: the adapter becomes part of the weights, which get other memory."""
    for wrapper in (getattr(layer.experts, name) for name in BOTH):
        a, b = wrapper.lora_A["one"].parameters(), wrapper.lora_B["one"].parameters()
        for weight, into, out in zip(wrapper.base_layer.parameters(), a, b, strict=True):
            weight.data = weight.data + 0.5 * (out @ into).detach()
        wrapper.merged_adapters.append("one")


def unwrap(layer: Any) -> None:
    for name in BOTH:
        setattr(layer.experts, name, getattr(layer.experts, name).to_wrap)


def change(
    make: Any, later: Any = None, after_ddp: bool = False, fuses: bool = True, **more: Any
) -> Change:
    """A row; Megatron's linears, of which some adapters are made, fuse with Apex only."""
    return Change(partial(wrap, make=make, **more), after_ddp=after_ddp, later=later, fuses=fuses)


OF_ONE, SHARED, OF_EACH, HALF_SHARED = map(
    of_bridge, ("of one", "shared", "of each", "half shared")
)


def of_swift(later: Callable[[Any], None]) -> Change:
    """A row with mcore-bridge's two adapters, of which the first one is active."""
    make = lambda linear, name, config: LoraParallelLinear(linear, config, ("one", "two"))  # noqa: E731
    return change(make, later)


# Name -> the layer has one module for all experts, as on a GPU; and what is done to it.
ADAPTED: dict[str, tuple[bool, Change]] = {
    "of one": (False, change(OF_ONE)),
    "of one, after DDP": (False, change(OF_ONE, after_ddp=True)),
    "trained": (False, change(OF_ONE, frozen=False)),
    "shared": (True, change(SHARED, fuses=False)),
    "shared, trained": (True, change(SHARED, fuses=False, frozen=False)),
    "of each": (True, change(OF_EACH)),
    "of each, trained": (True, change(OF_EACH, frozen=False)),
    "half shared": (True, change(HALF_SHARED, fuses=False)),
    "fc1": (True, change(OF_EACH, linears=("linear_fc1",))),
    "fc2": (True, change(OF_EACH, linears=("linear_fc2",))),
    "switched off": (True, change(OF_EACH, partial(set_all, _adapter_enabled=False))),
    "taken away": (True, change(OF_EACH, unwrap)),
    "copied": (True, change(OF_EACH, lambda layer: copy_experts(layer, []))),
    "several": (True, of_swift(partial(set_all, _active_adapter=["one", "two"]))),
    "merged": (True, of_swift(merge)),
    "another": (True, of_swift(partial(set_all, _active_adapter="two"))),
    "none active": (True, of_swift(partial(set_all, _disable_adapters=True))),
}
