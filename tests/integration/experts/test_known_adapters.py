"""Which adapters grouped experts compute themselves: a wrapper that only looks like one, or has
another option, would be computed without what makes it different.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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


def of_bridge(linear: Any, kind: Any = LoRALinear, inner: Any = GroupedExpertLinearAdapter) -> Any:
    return kind(linear, inner(EXPERTS, linear.weight0, CONFIG))


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


def changed(make: Callable[[Any], Any], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrap(linear: Any) -> Any:
        wrapper = make(linear)
        change(wrapper)
        return wrapper

    return wrap


def with_weight(name: str, *shape: int, dtype: Any = torch.float32) -> Callable[[Any], None]:
    def change(wrapper: Any) -> None:
        getattr(wrapper.adapter, name).weight = nn.Parameter(torch.zeros(shape, dtype=dtype))

    return change


def train_scale(wrapper: Any) -> None:
    scale = vars(wrapper.adapter).pop("alpha")
    wrapper.adapter.alpha = nn.Parameter(torch.tensor(float(scale)))


def with_bias(wrapper: Any) -> None:
    wrapper.lora_B["one"].register_parameter("bias0", nn.Parameter(torch.zeros(2 * FFN)))


UNREAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "derived": (lambda linear: of_bridge(linear, Derived), "not a known one"),
    "fused": (lambda linear: of_bridge(linear, TEFusedLoRALinear), "not a known one"),
    "DoRA": (lambda li: of_bridge(li, inner=ParallelLinearDoRAAdapter), "not a known adapter"),
    "option": (changed(of_bridge, lambda w: setattr(w, "new", 1)), "not a known one, with known"),
    "module": (changed(of_bridge, lambda w: setattr(w, "gate", nn.ReLU())), "not a known one"),
    "option of the adapter": (
        changed(of_bridge, lambda w: setattr(w.adapter, "new", 1)),
        "not a known adapter, with known attributes",
    ),
    "trained scale": (changed(of_bridge, train_scale), "not a known adapter, with known attr"),
    "activation": (
        changed(of_bridge, lambda w: setattr(w.adapter, "activation", nn.ReLU())),
        "without an activation",
    ),
    "another dropout": (
        changed(of_bridge, lambda w: setattr(w.adapter, "dropout", nn.AlphaDropout())),
        "AlphaDropout",
    ),
    "other linears": (
        changed(of_bridge, lambda w: setattr(w.adapter, "linear_in", nn.Linear(HIDDEN, RANK))),
        "with factors of torch.nn.modules.linear.Linear",
    ),
    "slices": (
        changed(of_bridge, with_weight("linear_in", EXPERTS, RANK // 2, HIDDEN)),
        f"with factors [{RANK // 2}, {HIDDEN}] and [{2 * FFN}, {RANK}] of weights",
    ),
    "other experts": (
        changed(of_bridge, with_weight("linear_in", EXPERTS + 1, RANK, HIDDEN)),
        f"of {EXPERTS + 1} experts",
    ),
    "two dtypes": (
        changed(of_bridge, with_weight("linear_in", EXPERTS, RANK, HIDDEN, dtype=torch.bfloat16)),
        "with factors in torch.bfloat16 and torch.float32",
    ),
    "another module": (
        lambda linear: of_bridge(TEGroupedLinear(EXPERTS, HIDDEN, 2 * FFN, config=CONFIG)),
        "around another module",
    ),
    "variant": (changed(of_swift, lambda w: w.lora_variant.update(one=1)), "another variant"),
    "bias": (changed(of_swift, with_bias), "have other parameters than weights"),
    "lora_bias": (changed(of_swift, lambda w: w.lora_bias.update(one=True)), "with a bias"),
    "forward": (changed(of_bridge, lambda w: setattr(w, "forward", w.to_wrap)), "known attributes"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read(name: str) -> None:
    make, words = UNREAD[name]
    holder = experts()
    built = AsBuilt(holder)
    holder.linear_fc1 = make(holder.linear_fc1)
    said = built.change()
    assert said is not None
    assert said.startswith("linear_fc1 of the experts (Module) is now a ")
    assert "and was a TEGroupedLinear: " in said
    assert words in said
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


LATER: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "a hook": (
        of_bridge,
        lambda w: w.adapter.linear_out.register_forward_hook(print),
        "linear_fc1.adapter.linear_out (_GroupedExpertAdapterWeight) has a forward hook",
    ),
    "another forward": (
        of_bridge,
        lambda w: setattr(w.adapter, "forward", w.to_wrap),
        "is now a LoRALinear, and was a TEGroupedLinear: not a known adapter",
    ),
    "another class": (
        of_bridge,
        lambda w: setattr(w, "__class__", Derived),
        "is now a Derived, and was a TEGroupedLinear: not a known one",
    ),
    "one more": (
        of_swift,
        lambda w: w.lora_A.update({"two": nn.Linear(HIDDEN, RANK)}),
        "is now a LoraParallelLinear, and was a TEGroupedLinear: with parts of an adapter",
    ),
    "merged and off": (
        of_swift,
        lambda w: (w.merged_adapters.append("one"), setattr(w, "_disable_adapters", True)),
        "adapters of linear_fc1 differ by expert, or are merged and switched off",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_what_changes_later(name: str) -> None:
    make, change, words = LATER[name]
    holder = experts()
    built = AsBuilt(holder)
    holder.linear_fc1 = make(holder.linear_fc1)
    assert built.change() is None
    assert len(built.adapters["linear_fc1"]) == 1
    change(holder.linear_fc1)
    assert words in str(built.change())


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
    for attribute in ("alpha", "dim"):
        setattr(two.linear_fc1.adapter, attribute, 64)
        assert "differ by expert" in str(built.change())
        built.found = None
        setattr(two.linear_fc1.adapter, attribute, getattr(one.linear_fc1.adapter, attribute))
        assert built.change() is None
    two.linear_fc1._adapter_enabled = False
    assert "differ by expert" in str(built.change())


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
