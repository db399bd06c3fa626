"""Fixtures for tests of what engines find on a node."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from installation import VARIABLES

from megatron_ncclep.libraries import search


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages in place of the real ones, and no NCCL in the process."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(search, "loaded_nccl", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return folder


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Path or name of each libnccl.so.2 that can be opened -> its ncclGetVersion."""
    codes: dict[str, int] = {}

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        assert options["timeout"] > 0
        name = command[-1]
        if name not in codes:
            return SimpleNamespace(returncode=1, stdout="", stderr="OSError")
        path = name if "/" in name else f"/usr/lib/{name}"
        maps = f"1000-2000 r-xp 00000000 fe:00 1    {path}\n"
        return SimpleNamespace(returncode=0, stdout=f"{codes[name]} {0x1800}\n{maps}", stderr="")

    monkeypatch.setattr(search.subprocess, "run", run)
    return codes
