"""Calls a function on a module right after it is imported, without importing it early."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change(module)` when the module `name` is imported, or now if it already was.

    Imports nothing itself.  A second call with the same arguments does nothing until the module is
    imported.  Errors of `change` propagate from the import.
    """
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(f, _Finder) and f.waits_for(name, change) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module with the other finders, and patches it after its execution."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def waits_for(self, name: str, change: Callable[[ModuleType], None]) -> bool:
        """Whether this finder already has these arguments."""
        return (name, change) == (self._name, self._change)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, None for all others.

        A query is not an import (`importlib.util.find_spec` asks too), so the finder stays in
        place; the change is tied to the loader of this one spec.
        """
        if fullname != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run_module = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run_module(module)
                self._change(module)

            loader.exec_module = exec_module
        return spec
