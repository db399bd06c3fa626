"""Which adapters grouped experts compute themselves: a wrapper that only looks like one, or has
another option, would be computed without what makes it different.
"""

from __future__ import annotations

from functools import reduce, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_libraries import (
    RANK,
    GroupedExpertLinearAdapter,
    LoRALinear,
    LoraParallelLinear,
    TEGroupedLinear,
    named,
)
from torch import nn

from megatron_ncclep.integration.experts import adapters
from megatron_ncclep.integration.experts.as_built import AsBuilt

EXPERTS, HIDDEN, FFN = 3, 16, 8
CONFIG = SimpleNamespace(params_dtype=torch.float32)


def experts() -> Any:
    made = nn.Module()
    made.linear_fc1 = TEGroupedLinear(EXPERTS, HIDDEN, 2 * FFN, config=CONFIG)
    made.linear_fc2 = TEGroupedLinear(EXPERTS, FFN, HIDDEN, config=CONFIG)
    return made


def of_bridge(linear: Any) -> Any:
    return LoRALinear(linear, GroupedExpertLinearAdapter(EXPERTS, linear.weight0, CONFIG))


def of_swift(linear: Any) -> Any:
    return LoraParallelLinear(linear, CONFIG)


class Derived(LoRALinear):
    """A user's own."""


@named("megatron.bridge.peft.lora_layers")
class TEFusedLoRALinear(LoRALinear):
    pass


@named("megatron.bridge.peft.dora_layers")
class ParallelLinearDoRAAdapter(GroupedExpertLinearAdapter):
    pass


def weight(*shape: int, dtype: Any = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def put(module: Any, path: str, value: Any) -> None:
    *parts, name = path.split(".")
    setattr(reduce(getattr, parts, module), name, value)


FACTOR = "adapter.linear_in.weight"
# The wrapper, what is set on it or below it, and the words for it.
Row = tuple[Any, dict[str, Any], str]
UNREAD: dict[str, Row] = {
    "derived": (of_bridge, {"__class__": Derived}, "not a known one"),
    "fused": (of_bridge, {"__class__": TEFusedLoRALinear}, "not a known one"),
    "DoRA": (of_bridge, {"adapter.__class__": ParallelLinearDoRAAdapter}, "not a known adapter"),
    "option": (of_bridge, {"new": 1}, "not a known one, with known attributes"),
    "module": (of_bridge, {"gate": nn.ReLU()}, "not a known one"),
    "option of the adapter": (of_bridge, {"adapter.new": 1}, "adapter, with known attributes"),
    "trained scale": (of_bridge, {"adapter.alpha": weight()}, "adapter, with known attributes"),
    "activation": (of_bridge, {"adapter.activation": nn.ReLU()}, "without an activation"),
    "another dropout": (of_bridge, {"adapter.dropout": nn.AlphaDropout()}, "AlphaDropout"),
    "other linears": (
        of_bridge,
        {"adapter.linear_in": nn.Linear(HIDDEN, RANK)},
        "with factors of torch.nn.modules.linear.Linear",
    ),
    "slices": (
        of_bridge,
        {FACTOR: weight(EXPERTS, RANK // 2, HIDDEN)},
        f"with factors [{RANK // 2}, {HIDDEN}] and [{2 * FFN}, {RANK}] of weights",
    ),
    "other experts": (
        of_bridge,
        {FACTOR: weight(EXPERTS + 1, RANK, HIDDEN)},
        f"of {EXPERTS + 1} experts",
    ),
    "two dtypes": (
        of_bridge,
        {FACTOR: weight(EXPERTS, RANK, HIDDEN, dtype=torch.bfloat16)},
        "with factors in torch.bfloat16 and torch.float32",
    ),
    "another module": (of_bridge, {"to_wrap": experts().linear_fc1}, "around another module"),
    "variant": (of_swift, {"lora_variant": {"one": 1}}, "another variant"),
    "bias": (of_swift, {"lora_B.one.bias0": weight(2)}, "have other parameters than weights"),
    "lora_bias": (of_swift, {"lora_bias": {"one": True}}, "with a bias"),
    "forward": (of_bridge, {"forward": print}, "known attributes"),
}
# After grouped experts have computed the adapter once.
LATER: dict[str, Row] = {
    "a hook": (
        of_bridge,
        {"adapter.linear_out._forward_hooks": {0: print}},
        "linear_fc1.adapter.linear_out (_GroupedExpertAdapterWeight) has a forward hook",
    ),
    "another forward": (
        of_bridge,
        {"adapter.forward": print},
        "is now a LoRALinear, and was a TEGroupedLinear: not a known adapter",
    ),
    "another class": (
        of_bridge,
        {"__class__": Derived},
        "is now a Derived, and was a TEGroupedLinear: not a known one",
    ),
    "one more": (
        of_swift,
        {"lora_A.two": nn.Linear(HIDDEN, RANK)},
        "is now a LoraParallelLinear, and was a TEGroupedLinear: with parts of an adapter",
    ),
    "merged and off": (
        of_swift,
        {"merged_adapters": ["one"], "_disable_adapters": True},
        "adapters of linear_fc1 differ by expert, or are merged and switched off",
    ),
}


@pytest.mark.parametrize("name", [*UNREAD, *LATER])
def test_what_is_not_read(name: str) -> None:
    make, changes, words = (UNREAD | LATER)[name]
    holder = experts()
    built = AsBuilt(holder)
    holder.linear_fc1 = make(holder.linear_fc1)
    if name in LATER:
        assert built.change() is None
        assert len(built.adapters["linear_fc1"]) == 1
    for path, value in changes.items():
        put(holder.linear_fc1, path, value)
    said = str(built.change())
    assert words in said
    if name in UNREAD:
        assert said.startswith("linear_fc1 of the experts (Module) is now a ")
        assert "and was a TEGroupedLinear: " in said
        assert not built.adapters


@pytest.mark.parametrize("says_whose", [False, True])
def test_a_patched_class(says_whose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One patched as usual, with functools.wraps, was computed as if it were not patched."""
    holder = experts()
    built = AsBuilt(holder)
    patch = lambda self, rows, *args: self.to_wrap(rows)  # noqa: E731
    patch = wraps(LoRALinear.forward)(patch) if says_whose else patch
    monkeypatch.setattr(LoRALinear, "forward", patch)
    holder.linear_fc1 = of_bridge(holder.linear_fc1)
    assert "with known attributes" in str(built.change())


def test_not_all_experts() -> None:
    """Experts with a module each: adapters on some of them, or of other settings."""
    holder = nn.Module()
    holder.local_experts = nn.ModuleList(experts() for _ in range(2))
    built, (one, two) = AsBuilt(holder), holder.local_experts
    one.linear_fc1 = of_bridge(one.linear_fc1)
    said = str(built.change())
    assert "linear_fc1 of local_experts.0 (Module) is now a LoRALinear" in said
    assert said.endswith(": not around all experts")
    built.found = None
    two.linear_fc1 = of_bridge(two.linear_fc1)
    assert built.change() is None
    (adapter,) = built.adapters["linear_fc1"]
    assert list(adapter.a) == [each.linear_fc1.adapter.linear_in for each in (one, two)]
    for path, value in (("adapter.alpha", 64), ("adapter.dim", 64), ("_adapter_enabled", False)):
        usual = reduce(getattr, path.split("."), two.linear_fc1)
        put(two.linear_fc1, path, value)
        assert "differ by expert" in str(built.change())
        built.found = None
        put(two.linear_fc1, path, usual)
        assert built.change() is None


def test_the_list_of_experts() -> None:
    """Megatron-Bridge walks over a model and puts the same experts into a new list."""
    holder = nn.Module()
    holder.local_experts = nn.ModuleList(experts() for _ in range(2))
    built = AsBuilt(holder)
    one, two = holder.local_experts
    holder.local_experts = nn.ModuleList([one, two])
    assert built.change() is None
    holder.local_experts = nn.ModuleList([two, one])
    assert "local_experts of the experts (Module) is now a ModuleList" in str(built.change())


def test_a_dtype_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: factors in fp32 beside weights in bf16."""
    why = "torch's grouped_mm has kernels for bf16"
    monkeypatch.setattr(adapters, "unavailable_reason", lambda device, dtype: why)
    holder = experts()
    built = AsBuilt(holder)
    holder.linear_fc2 = of_swift(holder.linear_fc2)
    assert str(built.change()).endswith(f": with factors in torch.float32: {why}")
