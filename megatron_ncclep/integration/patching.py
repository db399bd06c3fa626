"""Patching a place in Megatron: check it, wrap it once, and mark it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron_ncclep.errors import IntegrationError
from megatron_ncclep.integration.checks.unsupported import NEWEST, OLDEST

_MARK = "_changed_by_megatron_ncclep"


def unpatched(module: ModuleType, owner: Any, name: str, parameters: list[str]) -> Any:
    """Return the function to wrap, or None if it is wrapped already; check its parameters.

    Raises:
        IntegrationError: it does not exist, or takes other parameters; names it.
    """
    function = getattr(owner, name, None)
    where = f"{module.__name__}.{'' if owner is module else owner.__name__ + '.'}{name}"
    if not callable(function):
        raise unknown_megatron(where, "a function")
    if is_changed(function):
        return None
    missing = [p for p in parameters if p not in inspect.signature(function).parameters]
    if missing:
        raise unknown_megatron(where, f"a function with the parameter {missing[0]!r}")
    return function


def check_methods(owner: Any, expected: dict[str, int]) -> None:
    """Require a class of Megatron's to have methods with the expected numbers of arguments.

    Raises:
        IntegrationError: one is missing, or takes other arguments; names it.
    """
    for name, number in expected.items():
        function = getattr(owner, name, None)
        if not callable(function) or len(inspect.signature(function).parameters) != 1 + number:
            where = f"{owner.__module__}.{owner.__name__}.{name}"
            raise unknown_megatron(
                where, f"a method of {number} argument{'s' if number > 1 else ''}"
            )


def unknown_megatron(place: str, expected: str) -> IntegrationError:
    """The error for a Megatron-Core that differs from what the integration expects."""
    return IntegrationError(
        f"{place} is not {expected}: this Megatron-Core is not one that megatron_ncclep knows "
        f"({OLDEST} to {NEWEST})"
    )


def mark_patched(function: Any) -> Any:
    """Mark `function` as a replacement of another."""
    setattr(function, _MARK, True)
    return function


def is_changed(function: Any) -> bool:
    """Whether `function` is such a replacement."""
    return getattr(function, _MARK, False)


@contextmanager
def validated_as(config: Any, field: str, value: str) -> Iterator[None]:
    """Show Megatron another value in a field of `config`, and restore its own value afterwards."""
    own = getattr(config, field)
    setattr(config, field, value)
    try:
        yield
    finally:
        setattr(config, field, own)
