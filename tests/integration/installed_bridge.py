"""Megatron-Bridge, where it is installed: its modules without the `__init__` of any package, which
import TransformerEngine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PACKAGE = "megatron.bridge"
is_installed = all(importlib.util.find_spec(name) for name in (PACKAGE, "hydra"))
needs_bridge = pytest.mark.skipif(not is_installed, reason="Megatron-Bridge is not installed")
FOLDERS = ("", "models", "peft", "training", "training/utils", "utils")


def without_init(patch: pytest.MonkeyPatch) -> None:
    """Make modules of Megatron-Bridge importable without running the `__init__` of any package."""
    spec: Any = importlib.util.find_spec(PACKAGE)
    (root,) = spec.submodule_search_locations
    for folder in FOLDERS:
        name = ".".join([PACKAGE, *folder.split("/")]).rstrip(".")
        package = ModuleType(name)
        package.__path__ = [f"{root}/{folder}"]
        patch.setitem(sys.modules, name, package)


def import_lora() -> None:
    """Import Megatron-Bridge's LoRA, also where TransformerEngine is missing, which it names."""
    for name in ("base", "recompute", "utils"):  # with what they import of Megatron
        module: Any = importlib.import_module(f"{PACKAGE}.peft.{name}")
    with pytest.MonkeyPatch.context() as for_import:
        if importlib.util.find_spec("transformer_engine") is None:
            module.HAVE_TE = False
            outer, inner = ModuleType("transformer_engine"), ModuleType("te.pytorch")
            inner.ops = SimpleNamespace(Sequential=object)  # type: ignore[attr-defined]
            outer.pytorch = inner  # type: ignore[attr-defined]
            for_import.setitem(sys.modules, "transformer_engine", outer)
            for_import.setitem(sys.modules, "transformer_engine.pytorch", inner)
        importlib.import_module(f"{PACKAGE}.peft.lora")
