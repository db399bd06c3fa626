"""What engines open at run time is found where it is, and its version is the library's own word.

The libraries are empty files here: a process that would open one is played by `answers`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.engines import libraries
from megatron_ncclep.engines.libraries import Library
from megatron_ncclep.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
# Before a fixture replaces it.
PYTHON_PATH = list(sys.path)
VARIABLES = (
    "NCCLEP_NCCL_LIBRARY",
    "NCCLEP_NCCL_EP_LIBRARY",
    "NCCL_EP_JIT_NVCC",
    "NCCL_EP_JIT_SOURCE_DIR",
    "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
    "CUDA_HOME",
)

MAPS = """\
7f1000000000-7f1000100000 r--p 00000000 fe:00 11         /opt/a b/libnccl.so.2
7f1000100000-7f1000900000 r-xp 00100000 fe:00 11         /opt/a b/libnccl.so.2
7f1000900000-7f1000a00000 rw-p 00000000 00:00 0
7f2000000000-7f2000100000 r-xp 00000000 fe:00 12         /opt/old/libnccl.so.2.28.9 (deleted)
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0          [stack]
"""


def touch(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def package(site: Path, name: str) -> None:
    touch(site / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA", f"Name: {name}\n".encode())


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages in place of the real ones, and no NCCL in the process."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(libraries, "loaded_nccl", lambda: None)
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

    monkeypatch.setattr(libraries.subprocess, "run", run)
    return codes


def packaged(site: Path, answers: dict[str, int], code: int = 23007) -> Path:
    """Install the package nvidia-nccl-cu13, headers included."""
    path = touch(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    touch(site / "nvidia" / "nccl" / "include" / "nccl.h")
    package(site, "nvidia-nccl-cu13")
    answers[str(path)] = code
    return path


def nccl_ep(site: Path, content: bytes = b"\0NCCL EP version 0.2.0+cuda13.3\0") -> Path:
    """Install the package nccl-extensions for CUDA 13, sources included."""
    touch(site / "nccl" / "ep" / "include" / "nccl_ep" / "common.hpp")
    package(site, "nccl-extensions")
    return touch(site / "nccl" / "ep" / "lib" / "cu13" / "libnccl_ep.so", content)


# --- what text and numbers mean ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "version"),
    [(23007, (2, 30, 7)), (22809, (2, 28, 9)), (20900, (2, 9, 0)), (2804, (2, 8, 4))],
)
def test_versions_of_nccl(code: int, version: tuple[int, int, int]):
    assert libraries.nccl_version(code) == version


@pytest.mark.parametrize(
    ("address", "path"),
    [
        (0x7F1000000000, "/opt/a b/libnccl.so.2"),
        (0x7F10008FFFFF, "/opt/a b/libnccl.so.2"),
        (0x7F1000900000, None),  # no file there
        (0x7F1000A00000, None),  # nothing there: an end is the first address behind
        (0x7F2000000001, "/opt/old/libnccl.so.2.28.9"),
        (0, None),
    ],
)
def test_file_at_an_address(address: int, path: str | None):
    assert libraries.mapped_file(MAPS, address) == (path and Path(path))


def test_text_of_a_library():
    path = Path("/opt/libnccl.so.2")
    assert str(Library(path, (2, 30, 7), "so")) == "2.30.7, /opt/libnccl.so.2 (so)"
    assert str(Library(path, None, "so")) == "version unknown, /opt/libnccl.so.2 (so)"


# --- NCCL ----------------------------------------------------------------------------------------


@pytest.mark.cpu_only  # a machine with GPUs may have an NCCL preloaded, for NVIDIA's library
def test_the_loaded_nccl_is_torchs():
    """In a process of its own: this one's look-up is replaced.  A torch for the CPU loads none."""
    code = (
        "import torch\n"
        "from megatron_ncclep.engines.libraries import loaded_nccl\n"
        "found, maps = loaded_nccl(), open('/proc/self/maps').read()\n"
        "assert (found is None) == ('/libnccl.so.2' not in maps), found\n"
        "if found:\n"
        "    assert found.path.is_file() and str(found.path) in maps\n"
        "    assert found.version == torch.cuda.nccl.version(), found\n"
        "    assert found.found == 'loaded in this process'\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, text=True, capture_output=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.cpu_only  # as above
def test_looking_for_nccl_loads_none():
    """In a process without torch's, where the loader would find the one of NVIDIA's package."""
    code = """
import importlib.util, sys, types
sys.modules["torch"] = types.ModuleType("torch")
spec = importlib.util.spec_from_file_location("libraries", sys.argv[1])
sys.modules["libraries"] = libraries = importlib.util.module_from_spec(spec)
spec.loader.exec_module(libraries)
assert libraries.loaded_nccl() is None
packaged, system = libraries.packaged_nccl(), libraries.system_nccl()
assert libraries.find_nccl() == (packaged or system)
if packaged:
    assert packaged.version == system.version and packaged.path == system.path
assert "/libnccl.so" not in open("/proc/self/maps").read()
"""
    spec = PathFinder.find_spec("nvidia", PYTHON_PATH)
    folders = spec.submodule_search_locations if spec else None
    library_path = ":".join(f"{folder}/nccl/lib" for folder in folders or ())
    done = subprocess.run(
        [sys.executable, "-c", code, libraries.__file__], cwd=ROOT, text=True,
        capture_output=True, timeout=120, env={**os.environ, "LD_LIBRARY_PATH": library_path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_script_that_asks_a_library():
    """Asked is a library that every machine has, for another function: it has no ncclGetVersion."""
    script = libraries._PROBE.replace("ncclGetVersion", "getpid")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, "libc.so.6"], text=True, capture_output=True
    )
    answer, _, maps = done.stdout.partition("\n")
    path = libraries.mapped_file(maps, int(answer.split()[1]))
    assert path is not None
    assert "libc" in path.name
    assert libraries._probe("libc.so.6") == libraries._Probe()


def test_nccl_is_looked_for_in_order(
    site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert libraries.find_nccl() is None
    answers["libnccl.so.2"] = 22809
    assert libraries.find_nccl() == Library(
        Path("/usr/lib/libnccl.so.2"), (2, 28, 9), "the system's loader"
    )
    path = packaged(site, answers)
    assert libraries.find_nccl() == Library(path, (2, 30, 7), "package nvidia-nccl-cu13")
    loaded = Library(tmp_path / "loaded.so", (2, 29, 7), "loaded in this process")
    monkeypatch.setattr(libraries, "loaded_nccl", lambda: loaded)
    assert libraries.find_nccl() == loaded
    named = touch(tmp_path / "named.so")
    answers[str(named)] = 23203
    monkeypatch.setenv("NCCLEP_NCCL_LIBRARY", str(named))
    assert libraries.find_nccl() == Library(named, (2, 32, 3), "NCCLEP_NCCL_LIBRARY")


def test_a_loaded_library_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = touch(tmp_path / "libnccl.so.2")
    loaded = Library(path, (2, 29, 7), "loaded in this process")
    monkeypatch.setattr(libraries, "loaded_nccl", lambda: loaded)
    monkeypatch.setattr(libraries.subprocess, "run", None)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.setenv("NCCLEP_NCCL_LIBRARY", str(tmp_path / "link"))
    found = libraries.find_nccl()
    assert found is not None
    assert (found.path, found.version) == (tmp_path / "link", (2, 29, 7))


def test_two_packages_with_the_same_file(site: Path, answers: dict[str, int]):
    packaged(site, answers)
    package(site, "nvidia_nccl_cu12")
    package(site, "nvidia-cublas")
    found = libraries.packaged_nccl()
    assert found is not None
    assert found.found == "package nvidia-nccl-cu12 or nvidia-nccl-cu13"


def test_a_library_that_does_not_open_has_no_version(
    site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    path = packaged(site, answers)
    answers.clear()
    assert libraries.find_nccl() == Library(path, None, "package nvidia-nccl-cu13")

    def hang(command: list[str], timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(libraries.subprocess, "run", hang)
    assert libraries.find_nccl() == Library(path, None, "package nvidia-nccl-cu13")


# --- libnccl_ep ----------------------------------------------------------------------------------


def test_libnccl_ep_is_the_one_for_torchs_cuda(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert libraries.find_nccl_ep() is None
    path = nccl_ep(site)
    assert libraries.find_nccl_ep() == Library(path, (0, 2, 0), "package nccl-extensions")
    for cuda in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert libraries.find_nccl_ep() is None
    named = touch(tmp_path / "mine.so", b"NCCL EP version 0.11.3")
    monkeypatch.setenv("NCCLEP_NCCL_EP_LIBRARY", str(named))
    assert libraries.find_nccl_ep() == Library(named, (0, 11, 3), "NCCLEP_NCCL_EP_LIBRARY")


@pytest.mark.parametrize("content", [b"", b"NCCL version 2.30.7+cuda13.0"])
def test_a_file_without_libnccl_eps_version(site: Path, content: bytes):
    nccl_ep(site, content)
    found = libraries.find_nccl_ep()
    assert found is not None
    assert found.version is None


def test_folders_of_the_jit(site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    nccl_ep(site)
    library = libraries.find_nccl_ep()
    assert library is not None
    sources = site / "nccl" / "ep" / "include" / "nccl_ep"
    assert libraries.jit_folders(library) == {libraries.SOURCES: sources}

    packaged(site, answers)
    headers = site / "nvidia" / "nccl" / "include"
    both = {libraries.SOURCES: sources, libraries.NCCL_HEADERS: headers}
    assert libraries.jit_folders(library) == both

    monkeypatch.setenv(libraries.SOURCES, str(site / "nccl"))
    monkeypatch.setenv(libraries.NCCL_HEADERS, str(site / "nvidia"))
    assert libraries.jit_folders(library) == {
        libraries.SOURCES: site / "nccl",
        libraries.NCCL_HEADERS: site / "nvidia",
    }


def test_headers_are_those_of_the_nccl_in_use(
    site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    library = Library(nccl_ep(site), (0, 2, 0), "")
    packaged(site, answers, 23007)

    def headers(path: Path, version: tuple[int, int, int]) -> Path | None:
        monkeypatch.setattr(libraries, "loaded_nccl", lambda: Library(path, version, ""))
        return libraries.jit_folders(library).get(libraries.NCCL_HEADERS)

    alone = touch(tmp_path / "preloaded" / "libnccl.so.2")
    assert headers(alone, (2, 30, 7)) == site / "nvidia" / "nccl" / "include"
    assert headers(alone, (2, 29, 7)) is None
    touch(tmp_path / "usr" / "include" / "nccl.h")
    system = touch(tmp_path / "usr" / "lib" / "machine" / "libnccl.so.2.29.7")
    assert headers(system, (2, 29, 7)) == tmp_path / "usr" / "include"


# --- the compiler --------------------------------------------------------------------------------


def test_nvcc_is_looked_for_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def program(path: Path) -> Path:
        touch(path).chmod(0o755)
        return path

    which = libraries.shutil.which
    # Whatever this machine has in CUDA's usual folder.
    usual = {"/usr/local/cuda/bin/nvcc": None}
    monkeypatch.setattr(
        libraries.shutil, "which", lambda name: usual[name] if name in usual else which(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert libraries.find_nvcc() is None
    usual["/usr/local/cuda/bin/nvcc"] = "/usr/local/cuda/bin/nvcc"
    assert libraries.find_nvcc() == Path("/usr/local/cuda/bin/nvcc")
    on_path = program(tmp_path / "path" / "nvcc")
    assert libraries.find_nvcc() == on_path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert libraries.find_nvcc() == on_path  # a toolkit without a compiler
    in_home = program(tmp_path / "home" / "bin" / "nvcc")
    assert libraries.find_nvcc() == in_home
    mine = program(tmp_path / "mine")
    monkeypatch.setenv("NCCL_EP_JIT_NVCC", str(mine))
    assert libraries.find_nvcc() == mine


# --- what is named and missing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "find"),
    [
        ("NCCLEP_NCCL_LIBRARY", libraries.find_nccl),
        ("NCCLEP_NCCL_EP_LIBRARY", libraries.find_nccl_ep),
        ("NCCL_EP_JIT_NVCC", libraries.find_nvcc),
        (libraries.SOURCES, lambda: libraries.jit_folders(Library(Path("/x/y.so"), None, ""))),
        (libraries.NCCL_HEADERS, lambda: libraries.jit_folders(Library(Path("/x/y.so"), None, ""))),
    ],
)
def test_what_is_named_must_exist(
    variable: str, find: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    with pytest.raises(InputError, match=f"{variable}={tmp_path}/gone: .*unset the variable"):
        find()
