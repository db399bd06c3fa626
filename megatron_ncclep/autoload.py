"""Lets a plain `pip install` be enough: hooks the import of a few Megatron-Core modules.

torch calls `autoload` at the end of `import torch` (entry point group `torch.backends`).  It puts a
finder in front of the import system that lets three Megatron modules be changed right after they
were imported; it imports nothing itself, and it can never break `import torch`.

Off switches: NCCLEP_AUTOLOAD=0 for this package, TORCH_DEVICE_BACKEND_AUTOLOAD=0 for all of torch's
extensions.
"""

from __future__ import annotations

import importlib.abc
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_ncclep import envs

# The modules that integration.HOOKS changes; named here too, because importing integration for them
# would cost every `import torch` its time.  A test compares the two.
HOOKED_MODULES = (
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.training.arguments",
)


def autoload() -> None:
    """What torch calls.  Any failure becomes a warning: torch must be importable without us."""
    try:
        if envs.get("NCCLEP_AUTOLOAD"):
            hook_imports()
    except Exception as error:
        warnings.warn(f"megatron_ncclep could not hook into imports: {error}", stacklevel=2)


def hook_imports() -> None:
    """Let the modules of `HOOKED_MODULES` be changed when they are imported.  Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and wraps the loader of the modules that are to be changed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for one of the hooked modules, None for all others."""
        if fullname not in HOOKED_MODULES:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader)
        return spec


class _ChangingLoader(importlib.abc.Loader):
    """Loads a module as its own loader does, then changes it and gives it its loader back."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then change it.

        A place that is not what the integration expects is a warning here, because the script may
        not want our dispatcher at all; `install()` raises it.
        """
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        from megatron_ncclep import integration
        from megatron_ncclep.errors import IntegrationError

        try:
            integration.change_module(module)
        except IntegrationError as error:
            warnings.warn(
                f"--moe-token-dispatcher-type ncclep is not available: {error}", stacklevel=2
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
