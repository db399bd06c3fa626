"""What users and libraries put on the modules of experts after Megatron has built them.

Grouped experts do not call the modules that hold their weights.  So they may stand in for these
only as long as calling them would be the same: a wrapper, a hook, another `forward` or class, a
parametrization or a quantised weight has to count.  They compute adapters of known kinds themselves
(adapters.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as of_torch

from megatron_ncclep.integration.experts.adapters import Adapter, Pair, together, unread, what_is_in

# DDP's hook that waits for a module's weights (overlap_param_gather); grouped experts call it.
_DDP_HOOK = "DistributedDataParallel._make_forward_pre_hook.<locals>.hook"
# TransformerEngine's hooks that note, before it captures a layer, which of its modules are called.
_CAPTURE = "transformer_engine.pytorch.graph"
_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
# Hooks of all modules of the process, and what they are.
_GLOBAL_HOOKS = [(getattr(of_torch, f"_global{name}"), kind) for name, kind in _HOOKS.items()]
_ANY = [hooks for hooks, _ in _GLOBAL_HOOKS]


class _Built(NamedTuple):
    """A module as it was built, or as adapters have left it."""

    module: nn.Module
    kind: type[nn.Module]
    forward: Any
    children: dict[str, nn.Module | None]
    parameters: list[type]
    activation: Any

    @classmethod
    def of(cls, module: nn.Module) -> _Built:
        """The module as it is."""
        kind, parameters = type(module), module._parameters.values()
        children, activation = dict(module._modules), vars(module).get("activation_func")
        return cls(module, kind, kind.forward, children, list(map(type, parameters)), activation)


class AsBuilt:
    """The modules of one layer's experts as they were when this object was made.

    Adapters that grouped experts compute (adapters.py), around the same linear of all experts,
    are no change.

    Attributes:
        found: the first change that `change` has found, in words; None: none yet.
        adapters: "linear_fc1" or "linear_fc2" -> its adapters, as `change` has found them.
        linears: the same -> the linears themselves, one for all experts or one for each.
    """

    def __init__(self, experts: nn.Module, takes_adapters: bool = True) -> None:
        """Remember all modules below `experts` that have a part in computing, and itself.

        Unless `takes_adapters`, these are a change too.
        """
        self._takes_adapters = takes_adapters
        self.found: str | None = None
        self.adapters: dict[str, list[Adapter]] = {}
        self._wrappers: dict[str, list[nn.Module]] = {}
        self._read: dict[str, list[list[Pair] | None]] = {}  # from which `adapters` were made
        self._original = [_Built.of(module) for module in experts.modules()]
        self._now = self._original
        self._holders = {
            layer: [built for built in self._original if layer in built.children]
            for layer in ("linear_fc1", "linear_fc2")
        }
        self.linears: dict[str, list[Any]] = {
            layer: [built.children[layer] for built in holders]
            for layer, holders in self._holders.items()
        }

    def modules(self) -> Iterator[nn.Module]:
        """The experts, and all modules below them, with those of adapters."""
        return (built.module for built in self._now)

    def change(self) -> str | None:
        """Say what is not as it was built.  What was found once stays found.

        Every pass asks, so this looks at attributes only: a few us of host time.
        """
        if self.found is not None:
            return self.found
        if any(_ANY):
            self.found = next(f"all modules have {kind}" for hooks, kind in _GLOBAL_HOOKS if hooks)
            return self.found
        if self._changed() is not None:
            if self._takes_adapters:
                self._take_adapters()
            if (changed := self._changed()) is not None:
                self.found = self._words(changed)
                return self.found
        for layer, wrappers in self._wrappers.items():
            read = list(map(what_is_in, wrappers))
            if read == self._read.get(layer):
                continue
            if (adapters := together(read)) is None:
                self.found = f"adapters of {layer} differ by expert, or are merged and switched off"
                return self.found
            self.adapters[layer], self._read[layer] = adapters, read
        return None

    def _changed(self) -> _Built | None:
        """The first module that is not as it was."""
        for built in self._now:
            module, kind, forward, children, parameters, activation = built
            own = module.__dict__
            if (
                module.__class__ is not kind
                or "forward" in own
                or kind.forward is not forward
                or own["_modules"] != children
                or (
                    (own["_parameters"] or parameters)
                    and list(map(type, own["_parameters"].values())) != parameters
                )
                or own.get("activation_func") is not activation
                or (
                    (
                        own["_forward_hooks"]
                        or own["_forward_pre_hooks"]
                        or own["_backward_hooks"]
                        or own["_backward_pre_hooks"]
                    )
                    and any(_is_users(hook) for hooks in _HOOKS for hook in own[hooks].values())
                )
            ):
                return built
        return None

    def _take_adapters(self) -> None:
        """Have wrappers that can be read, and what is below them, count as built."""
        self.adapters, self._wrappers, self._read = {}, {}, {}
        for layer, holders in self._holders.items():
            now: list[Any] = [built.module._modules.get(layer) for built in holders]
            if now and not any(map(unread, now, self.linears[layer])):
                self._wrappers[layer] = now
        self._now, inside = [], list[nn.Module]()
        for built in self._original:
            children = dict(built.children)
            for name, before in built.children.items():
                inner: Any = built.module._modules.get(name)
                is_wrapper = inner in self._wrappers.get(name, ())
                if inner is not before and (is_wrapper or _is_same_list(inner, before)):
                    children[name] = inner
                    inside.append(inner)
            self._now.append(built._replace(children=children))
        known = {id(built.module) for built in self._original}
        modules = {id(m): m for module in inside for m in module.modules() if id(m) not in known}
        self._now += map(_Built.of, modules.values())

    def _words(self, built: _Built) -> str:
        """What is not as it was on this module."""
        module, kind = built.module, built.kind
        named = self._original[0].module.named_modules()
        name = next((name for name, each in named if each is module), "") or "the experts"
        where, own = f"{name} ({kind.__name__})", vars(module)
        if type(module) is not kind:
            return f"{where} is now of the class {type(module).__name__}"
        for attribute, hook in _HOOKS.items():
            if any(map(_is_users, own[attribute].values())):
                return f"{where} has {hook}"
        if "forward" in own or kind.forward is not built.forward:
            return f"{where} has another forward"
        for child in built.children.keys() | module._modules.keys():
            now, before = module._modules.get(child), built.children.get(child)
            if now is not before:
                said = f"{child} of {where} is now {_kind(now)}, and was {_kind(before)}"
                if before is None or child not in self.linears:
                    return said
                if not self._takes_adapters:
                    return f"{said}: adapters are computed in bf16 only"
                return f"{said}: {unread(now, before) or 'not around all experts'}"
        if own.get("activation_func") is not built.activation:
            return f"{where} has another activation_func"
        kinds = {n: type(p).__name__ for n, p in module._parameters.items()}
        return f"{where} has other parameters: {kinds}"


def _is_same_list(now: Any, before: Any) -> bool:
    """Whether the modules of a list are in another one, as after Megatron-Bridge's walk."""
    return type(now) is type(before) is nn.ModuleList and [*now] == [*before]


def _kind(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"


def _is_users(hook: Any) -> bool:
    return (
        getattr(hook, "__qualname__", "") != _DDP_HOOK
        and getattr(hook, "__globals__", {}).get("__name__") != _CAPTURE
    )
