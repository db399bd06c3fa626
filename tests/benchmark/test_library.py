"""NVIDIA's library in the benchmark: which one a name means.  Its rows: test_deepep.py."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import library
from benchmarks.library import LibrarySubject
from megatron_ncclep.benchmark import Setting, UnavailableError
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries.nccl_ep import CHOICE, FIXED_ORDER, PULL_PUSH

CASE = Case("yardstick", (20, 30, 25), hidden=24, num_experts=6, top_k=3, alignment=16)


@pytest.mark.parametrize(
    ("name", "package", "modes"),
    [
        ("nccl_ep_library", None, "00"),
        ("nccl_ep_library:nccl-extensions@24", "nccl-extensions", "00"),
        ("nccl_ep_library:transformer-engine", "transformer-engine", "00"),
        ("nccl_ep_library:transformer-engine+pull_push@64", "transformer-engine", "10"),
        ("nccl_ep_library:transformer-engine+pull_push+fixed_order", "transformer-engine", "11"),
    ],
)
def test_a_name_decides_what_the_library_finds(
    name: str, package: str | None, modes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says; the engine, asked whether it can run, has its fixed order."""
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setenv(PULL_PUSH, "1")
    monkeypatch.setenv(FIXED_ORDER, "0")
    before = dict(os.environ)
    seen: list[tuple[Any, ...]] = []

    def look(*arguments: Any, **options: Any) -> None:
        seen.append(tuple(os.environ.get(v) for v in (CHOICE, PULL_PUSH, FIXED_ORDER)))

    def fail(*arguments: Any) -> None:
        raise InputError("NCCLEP_NCCL_EP_LIBRARY=nccl-extensions: this package brings none")

    native, group = SimpleNamespace(NcclEpGroup=look), mock.Mock(rank=1, device=torch.device("cpu"))
    for place, found, value in (
        (library.extension, "load", lambda: native),
        (library.extension, "current_stream", lambda: 0),
        (library, "communicator_of", lambda *_: None),
        (library, "open_library", lambda: (None, {})),
        (library, "choose_engine", look),
        (library.EpGroup, "of", lambda group: group),
        (LibrarySubject, "_allocate", lambda *_: None),
    ):
        monkeypatch.setattr(place, found, value)
    setting, work = Setting(1, 2, "cpu", 60.0, lambda: group), Workload(CASE, 1)
    LibrarySubject(name, setting, work)
    assert seen == [(package, modes[0], "1"), (package, *modes)]
    assert dict(os.environ) == before
    monkeypatch.setattr(library, "choose_engine", fail)
    with pytest.raises(UnavailableError, match="this package brings none"):
        LibrarySubject(name, setting, work)
