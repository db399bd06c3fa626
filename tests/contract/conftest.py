"""Fixtures for tests of what engines find on a node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megatron_ncclep.libraries import nccl_ep, search


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages in place of the real ones, and no NCCL in the process."""
    modes = (nccl_ep.PULL_PUSH, nccl_ep.FIXED_ORDER)
    folders = (nccl_ep.SOURCES, nccl_ep.NCCL_HEADERS)
    others = ("NCCLEP_NCCL_LIBRARY", "NCCL_EP_JIT_NVCC", "CUDA_HOME")
    for name in (nccl_ep.CHOICE, *folders, *modes, *others):
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

    def probe(library: Path | str) -> tuple[search.Version | None, Path | None]:
        name = str(library)
        path = Path(name if "/" in name else f"/usr/lib/{name}")
        return (search.nccl_version(codes[name]), path) if name in codes else (None, None)

    monkeypatch.setattr(search, "_probe", probe)
    return codes
