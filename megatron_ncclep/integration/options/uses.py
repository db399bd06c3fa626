"""Notices when a process begins to use this package: a TransformerConfig asks for it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_ncclep.integration.import_hook import Change
from megatron_ncclep.integration.inference.support import FIELD as INFERENCE_FIELD
from megatron_ncclep.integration.options.field import NAME, TYPE_FIELD, is_ours
from megatron_ncclep.integration.patching import replaces


def notices(use: Callable[[], None]) -> Change:
    """A change that has `use` called when a config gets one of our types, or options of ours.

    Constructors and frameworks set attributes at any time, with and without a validation after
    that; every one of these assignments goes through `__setattr__`.
    """

    def asks(name: str, value: Any) -> bool:
        if name == TYPE_FIELD:
            return is_ours(value)
        return value is not None if name == NAME else name == INFERENCE_FIELD and value == NAME

    @replaces("TransformerConfig.__setattr__", [])
    def noticing(original: Any) -> Any:
        def set_attribute(self: Any, name: str, value: Any) -> None:
            if asks(name, value):
                use()
            original(self, name, value)

        return set_attribute

    def set_state(self: Any, state: Any) -> None:
        """A copy's, or an unpickled config's: what Python does without it.

        Not through `__setattr__`: a subclass's may refuse, or need what is not there yet.
        """
        fields, slots = state if isinstance(state, tuple) else (state, None)
        vars(self).update(fields or {})
        for name, value in (slots or {}).items():
            setattr(self, name, value)
        if any(asks(name, value) for name, value in vars(self).items()):
            use()

    def change(module: ModuleType) -> None:
        noticing(module)
        config_class: Any = module.TransformerConfig
        if not hasattr(config_class, "__setstate__"):
            config_class.__setstate__ = set_state

    return change
