"""What NVIDIA's library can lack, so that `auto` takes another engine and a name is an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ncclep.engines import libraries, nccl_ep
from megatron_ncclep.engines.libraries import Library, Version

LIBRARY = Path("/opt/libnccl_ep.so")


def obstacle(
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: Version | None = (0, 2, 0),
    is_installed: bool = True,
    nccl: Version | None = (2, 30, 7),
    has_nvcc: bool = True,
) -> str | None:
    """What is in the way on a machine with these."""
    library = Library(LIBRARY, version, "here") if is_installed else None
    loaded = Library(Path("/opt/libnccl.so.2"), nccl, "here")
    monkeypatch.setattr(libraries, "find_nccl_ep", lambda: library)
    monkeypatch.setattr(libraries, "loaded_nccl", lambda: loaded)
    monkeypatch.setattr(libraries, "find_nvcc", lambda: Path("/opt/nvcc") if has_nvcc else None)
    return nccl_ep._library_obstacle()


def test_a_machine_that_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle(monkeypatch) is None
    assert obstacle(monkeypatch, version=None) is None  # the library itself says it, when opened


@pytest.mark.parametrize(
    ("lack", "message"),
    [
        ({"is_installed": False}, "pip install nccl-extensions"),
        ({"version": (0, 3, 0)}, "libnccl_ep.so is version 0.3.0: .* the interface of 0.2 only"),
        ({"version": (1, 2, 0)}, "is version 1.2.0"),
        ({"nccl": (2, 28, 9)}, "built with NCCL 2.30.7 .* has NCCL 2.28.9"),
        ({"has_nvcc": False}, "there is no nvcc"),
    ],
)
def test_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, lack: dict[str, object], message: str
) -> None:
    text = obstacle(monkeypatch, **lack)  # type: ignore[arg-type]
    assert text is not None
    assert re.search(message, text), text
