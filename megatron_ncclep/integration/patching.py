"""Patching a place in another program: check it, wrap it once, and mark it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron_ncclep.errors import IntegrationError
from megatron_ncclep.integration.import_hook import Change, after_import, imported, the_finder
from megatron_ncclep.integration.releases import MEGATRON, Program

_MARK = "_changed_by_megatron_ncclep"


def replaces(
    place: str, parameters: Iterable[str], program: Program = MEGATRON, optional: bool = False
) -> Callable[[Callable[[Any], Any]], Change]:
    """Turn a function that wraps another one into a change of the module that has the latter.

    The module's own function is also replaced where other modules have imported it by name.

    Args:
        place: the function's name, or a method's: "MoELayer.__init__".
        parameters: names of some of its parameters.
        program: the module's.
        optional: leave a release alone in which the place is not as expected.

    Returns:
        a decorator.  The change does nothing where it is already done, and raises IntegrationError
        if the place does not exist, or takes other parameters.
    """
    *path, name = place.split(".")

    def decorate(wrap: Callable[[Any], Any]) -> Change:
        @functools.wraps(wrap)
        def change(module: ModuleType) -> None:
            owner: Any = module
            for part in path:
                owner = getattr(owner, part, None)
            original: Any = None if owner is None else getattr(owner, name, None)
            if is_changed(original):
                return
            if problem := _problem(original, parameters):
                if optional:
                    return
                raise unknown(f"{module.__name__}.{place}", problem, program)
            replacement = mark_patched(functools.wraps(original)(wrap(original)))
            setattr(owner, name, replacement)
            if owner is module:
                _replace_imported(original, replacement)

        return change

    return decorate


def _problem(function: Any, parameters: Iterable[str]) -> str | None:
    """What the function was expected to be and is not."""
    if not callable(function):
        return "a function"
    known = inspect.signature(function).parameters
    missing = [parameter for parameter in parameters if parameter not in known]
    return f"a function with the parameter {missing[0]!r}" if missing else None


def _replace_imported(original: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        # None blocks an import, and some packages put objects of theirs there.
        if issubclass(type(module), ModuleType):
            contents = object.__getattribute__(module, "__dict__")  # vars() loads lazy modules
            for name in [name for name, value in list(contents.items()) if value is original]:
                contents[name] = replacement


class Changes:
    """The changes of a program's modules; all of them are idempotent."""

    def __init__(self, program: Program, table: dict[str, tuple[Change, ...]]) -> None:
        """`table`: module -> its changes."""
        self.program, self.table = program, table

    def watch(self) -> None:
        """Have them made now, or after an import; a failure is only a warning, one in a process."""
        for name in self.table:
            after_import(name, self.change, self.program.feature)

    def require(self) -> None:
        """Make those of all modules that are imported, because the feature is used.

        Raises:
            IntegrationError: one has failed.
        """
        for name in self.table:
            if (module := imported(name)) is not None:
                self.change(module)

    def change(self, module: ModuleType) -> None:
        """Make those of a module; it may have none.

        Raises:
            IntegrationError: one has failed, for whatever reason.
        """
        for change in self.table.get(module.__name__, ()):
            try:
                change(module)
            except IntegrationError:
                raise
            except Exception as error:
                raise IntegrationError(
                    f"{module.__name__} cannot be changed ({type(error).__name__}: {error}): "
                    f"{self.program.not_known}"
                ) from error


def raise_failure(program: Program) -> None:
    """Raise, as an IntegrationError, what was only a warning during an import."""
    if (error := the_finder().failures.get(program.feature)) is not None:
        raise IntegrationError(str(error)) from error


def unknown(place: str, expected: str, program: Program = MEGATRON) -> IntegrationError:
    """The error for a program that differs from what is expected of it."""
    return IntegrationError(f"{place} is not {expected}: {program.not_known}")


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
