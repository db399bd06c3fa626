"""NVIDIA's libnccl_ep: which ones are installed, the NCCL that each runs with, and its sources.

Two packages bring one.  They were built with different NCCLs, and a process has only one NCCL.
Nothing here opens a library, and nothing is collective.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ncclep import envs
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import search
from megatron_ncclep.libraries.search import Library, Version, nccl_package, version_text

# Chooses the library: a path, or one of PACKAGES.
CHOICE = "NCCLEP_NCCL_EP_LIBRARY"
NO_LIBRARY = (
    "no libnccl_ep was found: pip install nccl-extensions, which requires NCCL 2.30.7, or "
    "transformer-engine, which requires NCCL 2.32.3 or newer"
)
# The library reads these when it compiles its kernels.
SOURCES = "NCCL_EP_JIT_SOURCE_DIR"
NCCL_HEADERS = "NCCL_EP_JIT_BUILD_INCLUDE_DIR"
# And these when it makes a group: dispatch pulls and combine pushes; an expert's rows are in the
# order of their tokens, while without it their order varies from call to call.
PULL_PUSH = "NCCL_EP_HT_EM_PULL_PUSH"
FIXED_ORDER = "NCCL_EP_HT_EM_AG_SCAN_MODE"


@dataclass(frozen=True)
class Build:
    """The properties of a known libnccl_ep.

    Attributes:
        requirement: pip's requirement that installs it.
        version: version of the library.
        interface: NCCL_EP_API_VERSION.
        nccl: the NCCL that it was built with.
        takes_newer: whether it also runs with newer ones.
        max_sms: the most SMs for its kernels where NVLink connects all ranks; None: the whole GPU.
        has_modes: whether it supports PULL_PUSH and FIXED_ORDER.
    """

    requirement: str
    version: Version
    interface: int
    nccl: Version
    takes_newer: bool
    max_sms: int | None
    has_modes: bool

    def takes(self, nccl: Library | None) -> bool:
        """Whether it runs with this NCCL."""
        if nccl is None or nccl.version is None:
            return False
        return nccl.version == self.nccl or (self.takes_newer and nccl.version > self.nccl)

    @property
    def demand(self) -> str:
        """The NCCL that it requires, for messages."""
        return f"NCCL {version_text(self.nccl)} {'or newer' if self.takes_newer else 'exactly'}"


BUILDS = (
    # Its barriers' indices overlap beyond 34 SMs.
    Build("nccl-extensions==0.1.0", (0, 2, 0), 2, (2, 30, 7), False, 34, has_modes=False),
    Build("transformer-engine==2.20.2", (0, 2, 0), 3, (2, 32, 3), True, None, has_modes=True),
)
# A text that occurs only in the file of a library with this interface; it has no function that
# returns it.
_MARK_OF_INTERFACE_3 = PULL_PUSH.encode()


@dataclass(frozen=True)
class NcclEpLibrary(Library):
    """A libnccl_ep on this machine.

    Attributes:
        package: the one of PACKAGES that brought it; None: its path was given.
        interface: NCCL_EP_API_VERSION; None for an unknown `version`.
        cuda: version of the CUDA that it was built with, such as "13.4"; None: it does not say.
    """

    package: str | None = None
    interface: int | None = None
    cuda: str | None = None

    @property
    def build(self) -> Build | None:
        """The properties of this version, if it is a known one."""
        mine = (self.version, self.interface)
        return next((b for b in BUILDS if (b.version, b.interface) == mine), None)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"libnccl_ep of {self.package}" if self.package else str(self.path)


# --- finding one ---------------------------------------------------------------------------------


def find_nccl_ep() -> NcclEpLibrary | None:
    """Return the libnccl_ep that engines are to open; None if there is none for torch's CUDA.

    This is the one that NCCLEP_NCCL_EP_LIBRARY names by its path or by its package; else the first
    of `installed_nccl_eps` that runs with the NCCL in use; else the first of them.

    Raises:
        InputError: NCCLEP_NCCL_EP_LIBRARY names a nonexistent file, or a package that is not
            installed.
    """
    choice: str | None = envs.get(CHOICE)
    if choice is not None and choice not in PACKAGES:
        return _read(search.existing(CHOICE, Path(choice)), CHOICE)
    installed = installed_nccl_eps()
    if choice is not None:
        installed = [library for library in installed if library.package == choice]
        if not installed:
            raise InputError(
                f"{CHOICE}={choice}: there is no libnccl_ep of this package for CUDA "
                f"{torch.version.cuda}: install it (pip install {choice}), or unset the "
                "variable to use the default search"
            )
    if len(installed) > 1:
        nccl = nccl_in_use()
        installed.sort(key=lambda library: not (library.build and library.build.takes(nccl)))
    return installed[0] if installed else None


# The packages that bring one, in the order of choice -> their folder, where the library may be in
# it, and what the names of their distributions begin with.  transformer-engine has it in the same
# place for CUDA 12 and 13: first of a wheel, then of a build from source.
PACKAGES: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "nccl-extensions": ("nccl", ("ep/lib/cu{cuda}",), "nccl-extensions"),
    "transformer-engine": ("transformer_engine", ("wheel_lib", "."), "transformer-engine-cu"),
}


def installed_nccl_eps() -> list[NcclEpLibrary]:
    """Return those that packages brought for the CUDA major version that torch is built for."""
    if torch.version.cuda is None:
        return []
    major = torch.version.cuda.partition(".")[0]
    found = (_of_package(name, major) for name in PACKAGES)
    return [library for library in found if library is not None]


def _of_package(package: str, cuda: str) -> NcclEpLibrary | None:
    """The library of one of PACKAGES for this major version of CUDA."""
    top, places, owner = PACKAGES[package]
    for folder in search.package_folders(top):
        for place in places:
            path = folder / place.format(cuda=cuda) / "libnccl_ep.so"
            if not path.is_file():
                continue
            name = search.distribution(folder.parent, owner) or package
            found = _read(path, f"package {name}", package)
            if found.cuda is None or found.cuda.partition(".")[0] == cuda:
                return found
    return None


def _read(path: Path, found: str, package: str | None = None) -> NcclEpLibrary:
    """Read a library's version from its file.

    Without a GPU the library cannot be asked: it needs the driver's libcuda.so.1.
    """
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return NcclEpLibrary(path, None, found, package)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        said = re.search(rb"NCCL EP version (\d+)\.(\d+)\.(\d+)(?:\+cuda([\d.]+))?", content)
        numbers = said.groups() if said else None
        is_newer = content.find(_MARK_OF_INTERFACE_3) >= 0
    if numbers is None:
        return NcclEpLibrary(path, None, found, package)
    major, minor, patch = map(int, numbers[:3])
    interface = (3 if is_newer else 2) if (major, minor) == (0, 2) else None
    cuda = numbers[3].decode() if numbers[3] else None
    return NcclEpLibrary(path, (major, minor, patch), found, package, interface, cuda)


# --- its requirements ----------------------------------------------------------------------------


def nccl_in_use() -> Library | None:
    """Return the NCCL that a libnccl_ep gets: the one that is loaded first, or None.

    If none is loaded yet, engines load theirs before they open a libnccl_ep.
    """
    return search.loaded_nccl() or search.find_nccl()


def nccl_problem(library: NcclEpLibrary, nccl: Library | None) -> str | None:
    """Say why `library` does not run with this NCCL and what helps; None if it does.

    An unknown library has no problem here: it checks the NCCL itself when it is opened.
    """
    if library.build is None or library.build.takes(nccl):
        return None
    have = "none" if nccl is None else f"NCCL {version_text(nccl.version)}"
    return (
        f"{library.name} requires {library.build.demand}, and this process has {have}: "
        f"{nccl_remedy(library.build, nccl)}"
    )


def nccl_remedy(build: Build, nccl: Library | None, installed: Sequence[Library] = ()) -> str:
    """Say how to get an NCCL and a libnccl_ep that fit each other."""
    for other in installed:
        if build.takes(other):
            return f"start the process with LD_PRELOAD={other.path}"
    for library in installed_nccl_eps():
        if library.build and library.build.takes(nccl):
            return f"set {CHOICE}={library.package}, whose libnccl_ep runs with it"
    version = version_text(build.nccl)
    package = (
        f"'{nccl_package()}>={version}'" if build.takes_newer else f"{nccl_package()}=={version}"
    )
    return (
        f"pip install {package} in this environment, or start the process with LD_PRELOAD set to "
        "such a libnccl.so.2, which is then loaded before torch loads its own"
    )


def jit_folders(library: NcclEpLibrary) -> dict[str, Path]:
    """Return the folders that `library` compiles its kernels from, by environment variable.

    Its own sources are next to it.  NCCL's headers must be those of the NCCL in use, so the search
    starts next to that one, and continues in NVIDIA's package if it is the same version.  Variables
    that the user has set stay; folders that are not found are left out.

    Raises:
        InputError: a variable names a folder that does not exist.
    """
    folders: dict[str, Path] = {}
    sources = search.named(SOURCES) or _sources_of(library.path)
    if sources is not None:
        folders[SOURCES] = sources
    headers = search.named(NCCL_HEADERS) or search.nccl_headers()
    if headers is not None:
        folders[NCCL_HEADERS] = headers
    return folders


def jit_problem(
    library: NcclEpLibrary, folders: Mapping[str, Path], nccl: Library | None
) -> str | None:
    """Say why `library` cannot compile its kernels from `folders`, and what helps.

    Kernels compiled from another library's sources, or with another NCCL's headers, do not fail:
    they read structs with the wrong layout.
    """
    missing = [name for name in (SOURCES, NCCL_HEADERS) if name not in folders]
    if missing:
        return (
            f"it compiles its kernels at first use: set {' and '.join(missing)} to the folder with "
            "its sources or NCCL's headers"
        )
    interface = _number(folders[SOURCES].parent / "nccl_ep.h", "NCCL_EP_API_VERSION")
    if None not in (interface, library.interface) and interface != library.interface:
        return (
            f"{SOURCES}={folders[SOURCES]} has the sources of interface {interface}, and "
            f"{library.path} is of interface {library.interface}: unset it, and those next to the "
            "library are taken"
        )
    parts = [
        _number(folders[NCCL_HEADERS] / "nccl.h", f"NCCL_{part}")
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    in_use = nccl.version if nccl is not None else None
    if in_use is not None and None not in parts and tuple(parts) != in_use:
        return (
            f"{NCCL_HEADERS}={folders[NCCL_HEADERS]} has the headers of NCCL "
            f"{'.'.join(map(str, parts))}, and this process has NCCL {version_text(in_use)}: unset "
            "it, or set it to the headers of that one"
        )
    return None


def mode_problem(library: NcclEpLibrary) -> str | None:
    """Say which mode that the environment asks for does not work with `library` and our engine."""
    has_modes = library.build is not None and library.build.has_modes
    if envs.get(PULL_PUSH) and not has_modes:
        return f"{PULL_PUSH} is set, which {library.name} would ignore: unset it"
    if envs.get(FIXED_ORDER) is False and has_modes:
        return (
            f"{FIXED_ORDER}=0: the order of an expert's rows would vary, and this engine promises "
            "a fixed order: unset it"
        )
    return None


def group_modes(library: NcclEpLibrary) -> dict[str, str]:
    """The variables to set when `library` makes a group for an engine."""
    return {FIXED_ORDER: "1"} if library.build and library.build.has_modes else {}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore their old values afterwards."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _sources_of(library: Path) -> Path | None:
    """Return the folder of the sources that came with the file `library`."""
    for folder in (*library.parents[:3], library.parent / "nccl_ep"):
        sources = folder / "include" / "nccl_ep"
        if (sources / "common.hpp").is_file():
            return sources
    return None


def _number(header: Path, name: str) -> int | None:
    """Read `#define name NUMBER` from a header; None if it is not there."""
    if not header.is_file():
        return None
    found = re.search(rf"^\s*#define\s+{name}\s+(\d+)", header.read_text(), re.MULTILINE)
    return int(found[1]) if found else None
