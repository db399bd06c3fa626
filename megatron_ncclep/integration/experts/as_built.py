"""What users and libraries put on the modules of experts after Megatron has built them.

Grouped experts do not call the modules that hold their weights.  So they may stand in for these
only as long as calling them would be the same: a wrapper (LoRA), a hook, another `forward` or
class, a parametrization or a quantised weight has to count.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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


class AsBuilt:
    """The modules of one layer's experts as they were when this object was made.

    Attributes:
        found: the first change that `change` has found, in words; None: none yet.
    """

    def __init__(self, experts: nn.Module) -> None:
        """Remember all modules below `experts` that have a part in computing, and itself."""
        self.found: str | None = None
        self._built = [
            (
                module,
                type(module),
                type(module).forward,
                dict(module._modules),
                list(map(type, module._parameters.values())),
                vars(module).get("activation_func"),
            )
            for module in experts.modules()
        ]

    def change(self) -> str | None:
        """Say what is not as it was built.  What was found once stays found.

        Every pass asks, so this looks at attributes only: a few us of host time.
        """
        if self.found is None:
            for module, kind, forward, children, parameters, activation in self._built:
                own = module.__dict__
                if (
                    module.__class__ is not kind
                    or "forward" in own
                    or kind.forward is not forward
                    or own["_modules"] != children
                    or list(map(type, own["_parameters"].values())) != parameters
                    or own.get("activation_func") is not activation
                    or ((hooks := own["_forward_hooks"]) and any(map(_is_users, hooks.values())))
                    or (
                        (hooks := own["_forward_pre_hooks"]) and any(map(_is_users, hooks.values()))
                    )
                    or ((hooks := own["_backward_hooks"]) and any(map(_is_users, hooks.values())))
                    or (
                        (hooks := own["_backward_pre_hooks"])
                        and any(map(_is_users, hooks.values()))
                    )
                ):
                    self.found = self._words(module, kind, forward, children, activation)
                    break
        return self.found

    def _words(
        self, module: nn.Module, kind: Any, forward: Any, children: dict[str, Any], activation: Any
    ) -> str:
        """What is not as it was built on this module."""
        named = self._built[0][0].named_modules()
        name = next((name for name, each in named if each is module), "") or "the experts"
        where, own = f"{name} ({kind.__name__})", vars(module)
        if type(module) is not kind:
            return f"{where} is now of the class {type(module).__name__}"
        for attribute, hook in _HOOKS.items():
            if any(map(_is_users, own[attribute].values())):
                return f"{where} has {hook}"
        if "forward" in own or kind.forward is not forward:
            return f"{where} has another forward"
        for child in children.keys() | module._modules.keys():
            now, before = module._modules.get(child), children.get(child)
            if now is not before:
                return f"{child} of {where} is now {_kind(now)}, and was {_kind(before)}"
        if own.get("activation_func") is not activation:
            return f"{where} has another activation_func"
        kinds = {n: type(p).__name__ for n, p in module._parameters.items()}
        return f"{where} has other parameters: {kinds}"


def _kind(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"


def _is_users(hook: Any) -> bool:
    return (
        getattr(hook, "__qualname__", "") != _DDP_HOOK
        and getattr(hook, "__globals__", {}).get("__name__") != _CAPTURE
    )
