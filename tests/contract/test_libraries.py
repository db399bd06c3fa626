"""What engines open at run time is found where it is, and its version is the library's own word.

The libraries are empty files here, and `answers` says what opening one would have told.
tests/contract/test_nccl_ep_library.py has the rest, of libnccl_ep.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from installation import install_nccl, touch

from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import search
from megatron_ncclep.libraries.nccl_ep import (
    NCCL_HEADERS,
    SOURCES,
    NcclEpLibrary,
    find_nccl_ep,
    jit_folders,
)
from megatron_ncclep.libraries.search import Library

pytestmark = pytest.mark.usefixtures("site")

ROOT = Path(__file__).resolve().parents[2]
MAPS = """\
7f1000000000-7f1000100000 r--p 00000000 fe:00 11         /opt/a b/libnccl.so.2
7f1000100000-7f1000200000 rw-p 00000000 00:00 0
7f2000000000-7f2000100000 r-xp 00000000 fe:00 12         /opt/old/libnccl.so.2.28.9 (deleted)
"""


# --- what text and numbers mean ------------------------------------------------------------------


def test_versions_of_nccl():
    for code, version in ((23007, (2, 30, 7)), (22809, (2, 28, 9)), (2804, (2, 8, 4))):
        assert search.nccl_version(code) == version


@pytest.mark.parametrize(
    ("address", "path"),
    [
        (0x7F1000000000, "/opt/a b/libnccl.so.2"),
        (0x7F1000100000, None),  # behind the end, and memory without a file
        (0x7F2000000001, "/opt/old/libnccl.so.2.28.9"),
        (0, None),
    ],
)
def test_file_at_an_address(address: int, path: str | None):
    assert search.mapped_file(MAPS, address) == (path and Path(path))


# --- NCCL ----------------------------------------------------------------------------------------


def test_the_script_that_asks_a_library():
    """Asked is a library that every node has, for another function: it has no ncclGetVersion."""
    script = search._PROBE.replace("ncclGetVersion", "getpid")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, "libc.so.6"], text=True, capture_output=True
    )
    answer, _, maps = done.stdout.partition("\n")
    path = search.mapped_file(maps, int(answer.split()[1]))
    assert path is not None
    assert "libc" in path.name
    assert search._probe("libc.so.6") == (None, None)


def test_nccl_is_looked_for_in_order(
    site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert search.find_nccl() is None
    answers["libnccl.so.2"] = 22809
    assert search.find_nccl() == Library(
        Path("/usr/lib/libnccl.so.2"), (2, 28, 9), "the system's loader"
    )
    path = install_nccl(site, answers)
    assert search.find_nccl() == Library(path, (2, 30, 7), "package nvidia-nccl-cu13")
    loaded = Library(tmp_path / "loaded.so", (2, 29, 7), "loaded in this process")
    monkeypatch.setattr(search, "loaded_nccl", lambda: loaded)
    assert search.find_nccl() == loaded
    named = touch(tmp_path / "named.so")
    answers[str(named)] = 23203
    monkeypatch.setenv("NCCLEP_NCCL_LIBRARY", str(named))
    assert search.find_nccl() == Library(named, (2, 32, 3), "NCCLEP_NCCL_LIBRARY")


def test_a_loaded_library_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = touch(tmp_path / "libnccl.so.2")
    loaded = Library(path, (2, 29, 7), "loaded in this process")
    monkeypatch.setattr(search, "loaded_nccl", lambda: loaded)
    monkeypatch.setattr(search.subprocess, "run", None)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.setenv("NCCLEP_NCCL_LIBRARY", str(tmp_path / "link"))
    found = search.find_nccl()
    origin = "NCCLEP_NCCL_LIBRARY, loaded in this process"
    assert found == Library(tmp_path / "link", (2, 29, 7), origin)


def test_a_library_that_does_not_open_has_no_version(site: Path, answers: dict[str, int]):
    path = install_nccl(site, answers)
    answers.clear()
    assert search.find_nccl() == Library(path, None, "package nvidia-nccl-cu13")


# --- the compiler --------------------------------------------------------------------------------


def test_nvcc_is_looked_for_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def program(path: Path) -> Path:
        touch(path).chmod(0o755)
        return path

    which = search.shutil.which
    # Whatever this node has in CUDA's usual folder.
    usual = {"/usr/local/cuda/bin/nvcc": None}
    monkeypatch.setattr(
        search.shutil, "which", lambda name: usual[name] if name in usual else which(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert search.find_nvcc() is None
    usual["/usr/local/cuda/bin/nvcc"] = "/usr/local/cuda/bin/nvcc"
    assert search.find_nvcc() == Path("/usr/local/cuda/bin/nvcc")
    on_path = program(tmp_path / "path" / "nvcc")
    assert search.find_nvcc() == on_path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert search.find_nvcc() == on_path  # a toolkit without a compiler
    in_home = program(tmp_path / "home" / "bin" / "nvcc")
    assert search.find_nvcc() == in_home
    mine = program(tmp_path / "mine")
    monkeypatch.setenv("NCCL_EP_JIT_NVCC", str(mine))
    assert search.find_nvcc() == mine


# --- what is named and missing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "find"),
    [
        ("NCCLEP_NCCL_LIBRARY", search.find_nccl),
        ("NCCLEP_NCCL_EP_LIBRARY", find_nccl_ep),
        ("NCCL_EP_JIT_NVCC", search.find_nvcc),
        (SOURCES, lambda: jit_folders(NcclEpLibrary(Path("/x/y.so"), None, ""))),
        (NCCL_HEADERS, lambda: jit_folders(NcclEpLibrary(Path("/x/y.so"), None, ""))),
    ],
)
def test_what_is_named_must_exist(
    variable: str, find: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    with pytest.raises(InputError, match=f"{variable}={tmp_path}/gone: .*unset the variable"):
        find()
