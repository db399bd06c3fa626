"""What NVIDIA's library is opened through, for tests that play it in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.benchmark import library_subject


def play_library(monkeypatch: pytest.MonkeyPatch, rank: int, **classes: Any) -> Any:
    """Have the benchmark find `classes` in the extension; returns a `Setting` of `rank`."""
    native = SimpleNamespace(**classes)
    monkeypatch.setattr(library_subject.extension, "load", lambda: native)
    monkeypatch.setattr(library_subject.extension, "current_stream", lambda: 0)
    monkeypatch.setattr(library_subject, "communicator_of", lambda *_: None)
    monkeypatch.setattr(library_subject, "open_library", lambda: SimpleNamespace(native=None))
    monkeypatch.setattr(library_subject, "choose_engine", lambda *_: None)
    monkeypatch.setattr(library_subject.EpGroup, "of", lambda group: group)
    group = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    return SimpleNamespace(rank=rank, timeout_s=60, device="cpu", new_group=lambda: group)
