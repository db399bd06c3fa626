"""Calls functions on modules right after they are imported, without importing them early.

All of it goes through one finder in `sys.meta_path`.  Whatever happens in these functions, an
import that would succeed without this package succeeds, with one warning.
"""

from __future__ import annotations

import importlib.abc
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_ncclep.logs import get_logger

Change = Callable[[ModuleType], None]


def after_import(name: str, change: Change, feature: str) -> None:
    """Call `change(module)` whenever the module `name` is imported, and now if it already was.

    Imports nothing itself.  `change` must be idempotent.  Its errors become a warning that
    `feature` is not available, one in a process.
    """
    finder = the_finder()
    finder.changes.setdefault(name, {})[change] = feature
    if (module := imported(name)) is not None:
        finder.guard(lambda: change(module), feature)


def before_import(package: str, prepare: Callable[[], None], feature: str) -> None:
    """Call `prepare()` once, before the next import of a module inside of `package`.

    Its errors become a warning that `feature` is not available.
    """
    the_finder().preparations[package] = (prepare, feature)


def imported(name: str) -> ModuleType | None:
    """The module `name` if its import has finished; None also where somebody has blocked it."""
    module = sys.modules.get(name)
    is_running = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_running else module


def warn(text: str) -> None:
    """Warn, but raise nothing where warnings are errors: this may be inside somebody's import."""
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:
        get_logger().warning(text)


def the_finder() -> Finder:
    """The process's one finder, made if there is none."""
    found = next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)
    if found is None:
        sys.meta_path.insert(0, found := Finder())
    return found


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules with the other finders, and has them changed after their execution.

    Attributes:
        changes: of each module, with what is not available if they fail.
        preparations: the same for packages, before one of their modules is imported.
        failures: what is not available, and the first error that was the reason.
    """

    def __init__(self) -> None:
        self.changes: dict[str, dict[Change, str]] = {}
        self.preparations: dict[str, tuple[Callable[[], None], str]] = {}
        self.failures: dict[str, Exception] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module to change, None for all others.

        A query is not an import (`importlib.util.find_spec` asks too): the changes are tied to the
        loader of this one spec.
        """
        package, _, inside = fullname.partition(".")
        if inside and package in self.preparations:
            self.guard(*self.preparations.pop(package))
        if fullname not in self.changes or self not in sys.meta_path:  # somebody may have saved it
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        finders = [finder for finder in behind if hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            feature = next(iter(self.changes[fullname].values()))
            self.guard(lambda: self._follow(spec.loader, fullname), feature)
        return spec

    def _follow(self, loader: Any, fullname: str) -> None:
        """Have the loader call the changes of a module after it has run it."""
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            if module.__name__ == fullname:  # some loaders are shared
                for change, feature in list(self.changes[fullname].items()):
                    self.guard(lambda change=change: change(module), feature)  # type: ignore[misc]

        loader.exec_module = exec_module

    def guard(self, call: Callable[[], None], feature: str) -> None:
        """Call it; the first error of a feature becomes a warning, all others nothing."""
        try:
            call()
        except Exception as error:
            if self.failures.setdefault(feature, error) is error:
                warn(f"{feature} is not available: {error}")
