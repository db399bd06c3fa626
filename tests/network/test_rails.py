"""Where kernels over a network are left out, and what a user is told then."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import setuptools
from fakes import compile_fake

from megatron_ncclep.errors import LibraryError
from megatron_ncclep.libraries import extension

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "is_used"),
    [
        ("2.30.7", True), ("2.31.0", True), ("3.0.0", True),
        ("2.30.6", False), ("2.29.7", False), ("", False),
    ],
)  # fmt: skip
def test_new_headers_are_used_and_a_build_without_says_so(
    version: str, is_used: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """What setup.py finds where NCCL_HOME has headers of a version; none: "" """
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    find = runpy.run_path(str(ROOT / "setup.py"))["nccl_headers"]
    include = tmp_path / "include"
    include.mkdir()
    if version:
        names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        text = "".join(f"#define NCCL_{name} {number}\n" for name, number in names)
        (include / "nccl.h").write_text(text)
        (include / "nccl_device.h").touch()
    monkeypatch.setenv("NCCL_HOME", str(tmp_path))
    assert find() == ((include, version) if is_used else (None, ""))
    found = f"NCCL {version}" if version else "no nccl_device.h"
    said = f"has {found}: without NCCL 2.30.7 (NCCL_HOME), no kernels over a network\n"
    assert is_used or capsys.readouterr().out.endswith(said)


@pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason())
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc builds the stand-in for NCCL")
def test_rails_and_windows_say_what_they_lack(tmp_path: Path) -> None:
    """The extension has no headers, or the NCCL that it finds is too old for them."""
    native = extension.load()
    nccl = native.Nccl(str(compile_fake(tmp_path / "nccl", nccl_version=22809)))
    communicator = native.Communicator(nccl, nccl.unique_id(), 2, 0, -1, 10.0)
    lacks = "its kernels have no network: (this extension was built without|they need NCCL 2.30.7)"
    with pytest.raises(LibraryError, match=lacks):
        native.Rails(communicator, 10.0)
    with pytest.raises(LibraryError, match=r"NCCL 2\.28\.9 has no windows over a network"):
        native.Window(communicator, 4096, over_network=True)
    communicator.abort()
