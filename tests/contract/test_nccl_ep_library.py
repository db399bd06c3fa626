"""Which libnccl_ep is taken, with which NCCL it runs, and what it compiles its kernels from.

The libraries are short texts here, with what the code reads in the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from installation import install_nccl, install_nccl_extensions, install_transformer_engine, touch

from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries import search
from megatron_ncclep.libraries.nccl_ep import (
    CHOICE,
    FIXED_ORDER,
    NCCL_HEADERS,
    PULL_PUSH,
    SOURCES,
    NcclEpLibrary,
    find_nccl_ep,
    jit_folders,
    jit_problem,
    mode_problem,
    nccl_problem,
)
from megatron_ncclep.libraries.search import Library, Version

pytestmark = pytest.mark.usefixtures("site")


def nccl(*version: int) -> Library:
    assert len(version) == 3
    return Library(Path("/opt/libnccl.so.2"), version, "loaded")


def extensions(site: Path) -> NcclEpLibrary:
    path, name = install_nccl_extensions(site), "nccl-extensions"
    return NcclEpLibrary(path, (0, 2, 0), f"package {name}", name, 2, "13.3")


def transformer_engine(site: Path) -> NcclEpLibrary:
    path, name = install_transformer_engine(site), "transformer-engine"
    return NcclEpLibrary(path, (0, 2, 0), f"package {name}-cu13", name, 3, "13.4")


# --- finding one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("install", [extensions, transformer_engine])
def test_each_package_brings_one_for_torchs_cuda(
    site: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[[Path], NcclEpLibrary]
) -> None:
    assert find_nccl_ep() is None
    assert install(site) == find_nccl_ep()
    for other in ("12.8", None):
        monkeypatch.setattr(torch.version, "cuda", other)
        assert find_nccl_ep() is None


def test_transformer_engine_built_from_its_sources_for_another_cuda(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = install_transformer_engine(site, cuda="12.9")
    built = built.rename(built.parents[1] / built.name)
    assert find_nccl_ep() is None
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = find_nccl_ep()
    assert found is not None
    assert (found.path, found.found) == (built, "package transformer-engine-cu12")


@pytest.mark.parametrize(
    ("version", "takers"),
    [
        # NVIDIA built one for 2.30.7 and no other, the other for 2.32.3 and what came after it.
        ((2, 30, 7), ["nccl-extensions"]),
        ((2, 32, 3), ["transformer-engine"]),
        ((3, 0, 0), ["transformer-engine"]),
        ((2, 28, 9), []),
        ((2, 31, 2), []),
        (None, []),
    ],
)
def test_the_library_that_takes_the_nccl_in_use_is_found(
    version: Version | None, takers: list[str], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If neither takes it, the first one says what it takes."""
    both = [extensions(site), transformer_engine(site)]
    loaded = nccl(*version) if version else None
    monkeypatch.setattr(search, "loaded_nccl", lambda: loaded)
    monkeypatch.setattr(search, "find_nccl", lambda: loaded)
    assert [one.package for one in both if nccl_problem(one, loaded) is None] == takers
    found = find_nccl_ep()
    assert found is not None
    assert found.package == (takers or ["nccl-extensions"])[0]


def test_one_can_be_chosen(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = extensions(site)
    monkeypatch.setattr(search, "loaded_nccl", lambda: nccl(2, 30, 7))
    monkeypatch.setenv(CHOICE, "nccl-extensions")
    assert find_nccl_ep() == expected
    monkeypatch.setenv(CHOICE, "transformer-engine")
    with pytest.raises(InputError, match=f"{CHOICE}=.*: there is no .* package for CUDA 13.0"):
        find_nccl_ep()
    assert transformer_engine(site) == find_nccl_ep()
    mine = touch(tmp_path / "mine.so", b"NCCL EP version 0.11.3")
    monkeypatch.setenv(CHOICE, str(mine))
    assert find_nccl_ep() == NcclEpLibrary(mine, (0, 11, 3), CHOICE)


# --- the NCCL that it takes ----------------------------------------------------------------------


def test_what_is_said_of_an_nccl_that_does_not_fit(site: Path) -> None:
    alone = extensions(site)
    assert nccl_problem(alone, nccl(2, 32, 3)) == (
        "libnccl_ep of nccl-extensions requires NCCL 2.30.7 exactly, and this process has NCCL "
        "2.32.3: pip install nvidia-nccl-cu13==2.30.7 in this environment, or start the process "
        "with LD_PRELOAD set to such a libnccl.so.2, which is then loaded before torch loads its "
        "own"
    )
    newer = transformer_engine(site)
    choose = f"set {CHOICE}=transformer-engine, whose libnccl_ep runs with it"
    assert str(nccl_problem(alone, nccl(2, 32, 3))).endswith(choose)
    text = str(nccl_problem(newer, None))
    assert "requires NCCL 2.32.3 or newer, and this process has none" in text
    assert "pip install 'nvidia-nccl-cu13>=2.32.3'" in text
    # A library that is not known looks itself.
    assert nccl_problem(NcclEpLibrary(Path("/x.so"), (0, 2, 1), ""), nccl(2, 28, 9)) is None


# --- what it compiles its kernels from -----------------------------------------------------------


def test_folders_of_the_jit(
    site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources are each library's own."""
    library = extensions(site)
    sources = site / "nccl" / "ep" / "include" / "nccl_ep"
    assert jit_folders(library) == {SOURCES: sources}
    theirs = site / "transformer_engine" / "wheel_lib" / "nccl_ep" / "include" / "nccl_ep"
    assert jit_folders(transformer_engine(site)) == {SOURCES: theirs}
    install_nccl(site, answers)
    headers = site / "nvidia" / "nccl" / "include"
    both = {SOURCES: sources, NCCL_HEADERS: headers}
    assert jit_folders(library) == both
    assert jit_problem(library, both, nccl(2, 30, 7)) is None

    monkeypatch.setenv(SOURCES, str(site / "nccl"))
    monkeypatch.setenv(NCCL_HEADERS, str(site / "nvidia"))
    assert jit_folders(library) == {SOURCES: site / "nccl", NCCL_HEADERS: site / "nvidia"}


def test_sources_and_headers_of_something_else(
    site: Path, answers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of one library in the environment of the other: kernels of both compile."""
    old, new = extensions(site), transformer_engine(site)
    install_nccl(site, answers, 23007)
    folders = jit_folders(old)
    assert jit_problem(old, folders, nccl(2, 30, 7)) is None
    text = str(jit_problem(new, folders, nccl(2, 30, 7)))
    assert re.search(f"{SOURCES}=.* has the sources of interface 2, and .* 3: unset it", text)
    right = {**folders, SOURCES: jit_folders(new)[SOURCES]}
    text = str(jit_problem(new, right, nccl(2, 32, 3)))
    assert re.search(f"{NCCL_HEADERS}=.* headers of NCCL 2.30.7, and .* NCCL 2.32.3", text)
    for missing in (SOURCES, NCCL_HEADERS):
        others = {name: folder for name, folder in folders.items() if name != missing}
        text = str(jit_problem(old, others, nccl(2, 30, 7)))
        assert f"set {missing} to the folder" in text


def test_modes_that_would_be_ignored(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = extensions(site), transformer_engine(site)
    assert (mode_problem(old), mode_problem(new)) == (None, None)
    monkeypatch.setenv(PULL_PUSH, "1")
    assert mode_problem(new) is None
    assert f"{PULL_PUSH} is set, which libnccl_ep of nccl-ext" in str(mode_problem(old))
    monkeypatch.setenv(PULL_PUSH, "0")
    monkeypatch.setenv(FIXED_ORDER, "0")
    assert mode_problem(old) is None
    assert f"{FIXED_ORDER}=0: " in str(mode_problem(new))
    assert nccl_ep_library.group_modes(new) == {FIXED_ORDER: "1"}
    assert nccl_ep_library.group_modes(old) == {}
