"""Notices when a process begins to use this package: a TransformerConfig asks for it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_ncclep.integration.import_hook import Change
from megatron_ncclep.integration.inference.support import FIELD as INFERENCE_FIELD
from megatron_ncclep.integration.options.field import NAME, TYPE_FIELD
from megatron_ncclep.integration.patching import replaces


def notices(use: Callable[[], None]) -> Change:
    """A change that has `use` called when a config gets one of our types, or options of ours.

    Constructors and frameworks set attributes at any time, with and without a validation after
    that; every one of these assignments goes through `__setattr__`.
    """

    @replaces("TransformerConfig.__setattr__", [])
    def noticing(original: Any) -> Any:
        def set_attribute(self: Any, name: str, value: Any) -> None:
            if name == NAME:
                is_ours = value is not None
            else:
                is_ours = name in (TYPE_FIELD, INFERENCE_FIELD) and value == NAME
            if is_ours:
                use()
            original(self, name, value)

        return set_attribute

    def change(module: ModuleType) -> None:
        noticing(module)
        config_class: Any = module.TransformerConfig
        if not hasattr(config_class, "__setstate__"):
            config_class.__setstate__ = _set_state

    return change


def _set_state(self: Any, state: Any) -> None:
    """A copy's, or an unpickled config's: what Python does without it, through `__setattr__`."""
    for part in state if isinstance(state, tuple) else (state,):
        for name, value in (part or {}).items():
            setattr(self, name, value)
