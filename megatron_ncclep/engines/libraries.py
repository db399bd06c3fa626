"""Finds what engines open at run time: NCCL, NVIDIA's libnccl_ep, and the compiler that it calls.

Nothing here opens a library for this process, and nothing is collective.  "Loaded" is judged at the
time of the call: import torch first, whose import loads the NCCL that it was installed with.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

import torch

from megatron_ncclep import envs
from megatron_ncclep.errors import InputError

Version = tuple[int, int, int]

NCCL = "libnccl.so.2"
# The engine `native` needs NCCL's windows and LSA pointers, as they are since this version.
OLDEST_NCCL: Version = (2, 28, 9)
# libnccl_ep's version -> the NCCL that it was built with; it refuses to run with any other.
NCCL_OF_NCCL_EP: dict[Version, Version] = {(0, 2, 0): (2, 30, 7)}

# Seconds for a process that does nothing but open a library.
PROBE_DEADLINE_S = 30.0

SOURCES = "NCCL_EP_JIT_SOURCE_DIR"
NCCL_HEADERS = "NCCL_EP_JIT_BUILD_INCLUDE_DIR"


@dataclass(frozen=True)
class Library:
    """A shared library on this machine.

    Attributes:
        path: of the file.
        version: what the library says of itself; None when it does not say it.
        found: how it was found, in words.
    """

    path: Path
    version: Version | None
    found: str

    def __str__(self) -> str:
        return f"{version_text(self.version)}, {self.path} ({self.found})"


def version_text(version: Version | None) -> str:
    """Write a version as `2.30.7`."""
    return "version unknown" if version is None else ".".join(map(str, version))


# --- NCCL ----------------------------------------------------------------------------------------


def find_nccl() -> Library | None:
    """Return the NCCL that engines are to open, or None if there is none.

    The first of: the one that NCCLEP_NCCL_LIBRARY names, the one that this process has loaded, the
    one of NVIDIA's package, the one that the system's loader finds.

    Raises:
        InputError: NCCLEP_NCCL_LIBRARY names no file.
    """
    named = _named("NCCLEP_NCCL_LIBRARY")
    loaded = loaded_nccl()
    if named is None:
        return loaded or packaged_nccl() or system_nccl()
    if loaded is not None and named.resolve() == loaded.path:
        return Library(named, loaded.version, "NCCLEP_NCCL_LIBRARY, loaded in this process")
    return Library(named, _probe(named).version, "NCCLEP_NCCL_LIBRARY")


def loaded_nccl() -> Library | None:
    """Return the NCCL that this process has loaded, or None.

    When there are several, it is the one that a library which needs libnccl.so.2 gets: the first.
    """
    try:
        # By name and with NOLOAD, the loader answers from what it has and opens nothing.
        library = ctypes.CDLL(NCCL, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value
    path = mapped_file(Path("/proc/self/maps").read_text(), address or 0)
    if path is None:
        return None
    code = ctypes.c_int()
    failed = library.ncclGetVersion(ctypes.byref(code))
    return Library(
        path, None if failed else nccl_version(code.value), found="loaded in this process"
    )


def packaged_nccl() -> Library | None:
    """Return the NCCL of NVIDIA's package nvidia-nccl-cu12 or -cu13, or None."""
    for folder in _package_folders("nvidia"):
        path = folder / "nccl" / "lib" / NCCL
        if path.is_file():
            owner = _distribution(folder.parent, "nvidia-nccl-")
            return Library(path, _probe(path).version, f"package {owner or 'nvidia'}")
    return None


def system_nccl() -> Library | None:
    """Return the NCCL that the system's loader finds by its name alone, or None."""
    probe = _probe(NCCL)
    if probe.path is None:
        return None
    return Library(probe.path, probe.version, "the system's loader")


def nccl_package() -> str:
    """The name of NVIDIA's package with the NCCL for torch's CUDA."""
    return f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"


def nccl_version(code: int) -> Version:
    """The version that ncclGetVersion's `code` means: 23007 is 2.30.7, and 2804 was 2.8.4."""
    base = 1000 if code < 10000 else 10000
    return code // base, code % base // 100, code % 100


def mapped_file(maps: str, address: int) -> Path | None:
    """Return the file of which `maps`, the text of /proc/PID/maps, has a part at `address`."""
    for line in maps.splitlines():
        # start-end permissions offset device inode path; the path may hold spaces, or not be there.
        span, *rest = line.split(None, 5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end and len(rest) == 5:
            # A file that was replaced since, by an update say, is marked.
            return Path(rest[-1].removesuffix(" (deleted)"))
    return None


@dataclass(frozen=True)
class _Probe:
    """What another process learned by opening a library; all None if it could not."""

    version: Version | None = None
    path: Path | None = None


# Prints ncclGetVersion's code and address, then the process's maps.
_PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
code = ctypes.c_int()
failed = library.ncclGetVersion(ctypes.byref(code))
address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value
print(-1 if failed else code.value, address)
print(open("/proc/self/maps").read())
"""


def _probe(library: Path | str) -> _Probe:
    """Ask a libnccl.so.2 for its version, in a process of its own.

    Opened here, even with RTLD_LOCAL, it would be the libnccl.so.2 of this process: the loader
    answers every later request for that name with the library that it has, and torch would get this
    one instead of its own.  The package's metadata is no substitute: -cu12 and -cu13 install the
    same file, and the last one wins.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE, str(library)],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return _Probe()
    if done.returncode != 0:  # no such library, or one that needs what is not here
        return _Probe()
    answer, _, maps = done.stdout.partition("\n")
    code, address = map(int, answer.split())
    return _Probe(nccl_version(code) if code >= 0 else None, mapped_file(maps, address))


# --- libnccl_ep ----------------------------------------------------------------------------------


def find_nccl_ep() -> Library | None:
    """Return NVIDIA's libnccl_ep, or None if there is none for torch's CUDA.

    The one that NCCLEP_NCCL_EP_LIBRARY names, else the one of the package nccl-extensions for the
    CUDA major version that torch is built for.

    Raises:
        InputError: NCCLEP_NCCL_EP_LIBRARY names no file.
    """
    named = _named("NCCLEP_NCCL_EP_LIBRARY")
    if named is not None:
        return Library(named, nccl_ep_version(named), "NCCLEP_NCCL_EP_LIBRARY")
    if torch.version.cuda is None:
        return None
    cuda_major = torch.version.cuda.partition(".")[0]
    for folder in _package_folders("nccl"):
        path = folder / "ep" / "lib" / f"cu{cuda_major}" / "libnccl_ep.so"
        if path.is_file():
            owner = _distribution(folder.parent, "nccl-extensions")
            return Library(path, nccl_ep_version(path), f"package {owner or 'nccl'}")
    return None


def nccl_ep_version(path: Path) -> Version | None:
    """Read from the file `path` which version of libnccl_ep it is.

    The library cannot be asked where there is no GPU: it needs the driver's libcuda.so.1.
    """
    if path.stat().st_size == 0:  # which cannot be mapped
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.search(rb"NCCL EP version (\d+)\.(\d+)\.(\d+)", content)
        if found is None:
            return None
        major, minor, patch = map(int, found.groups())
    return major, minor, patch


def jit_folders(library: Library) -> dict[str, Path]:
    """Return the folders that the libnccl_ep `library` compiles its kernels from, by variable.

    Its own sources lie beside it.  NCCL's headers must be those of the NCCL in use, so they are
    looked for beside that one, then in NVIDIA's package if it is the same version.  What the user
    has set stays; what is not to be found is left out.

    Raises:
        InputError: a variable names a folder that does not exist.
    """
    folders: dict[str, Path] = {}
    sources = _named(SOURCES) or _include_folder(library.path, "nccl_ep/common.hpp", "nccl_ep")
    if sources is not None:
        folders[SOURCES] = sources
    headers = _named(NCCL_HEADERS) or _nccl_headers()
    if headers is not None:
        folders[NCCL_HEADERS] = headers
    return folders


def find_nvcc() -> Path | None:
    """Return the CUDA compiler that libnccl_ep is to call, or None.

    The first of: NCCL_EP_JIT_NVCC, `bin/nvcc` under CUDA_HOME, PATH, /usr/local/cuda.

    Raises:
        InputError: NCCL_EP_JIT_NVCC is not a program.
    """
    wanted = envs.get("NCCL_EP_JIT_NVCC")
    if wanted is not None:
        found = shutil.which(wanted)
        if found is None:
            raise InputError(
                f"NCCL_EP_JIT_NVCC={wanted}: no such program; name one, or unset the variable"
            )
        return Path(found)
    home = envs.get("CUDA_HOME")
    candidates = [str(home / "bin" / "nvcc")] if home is not None else []
    for candidate in (*candidates, "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = shutil.which(candidate)
        if found is not None:
            return Path(found)
    return None


# --- look-ups ------------------------------------------------------------------------------------


def _named(variable: str) -> Path | None:
    """Return the path that an environment variable holds; it must exist."""
    path: Path | None = envs.get(variable)
    if path is not None and not path.exists():
        raise InputError(
            f"{variable}={path}: there is no such file or folder; correct the path, or unset the "
            "variable to have it looked for"
        )
    return path


def _package_folders(package: str) -> Iterator[Path]:
    """Yield the folders of the top-level `package` on Python's path; imports nothing.

    Several distributions share `nvidia` and `nccl`, so neither has to be a folder of one place.
    """
    # Not importlib.util.find_spec: it takes the word of whatever calls itself so in sys.modules.
    spec = PathFinder.find_spec(package)
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            yield Path(folder)


def _distribution(site: Path, prefix: str) -> str | None:
    """Return the name of the distribution in the folder `site` that starts with `prefix`.

    When there are several, whose file it is cannot be told: all their names.
    """
    names = (d.metadata["Name"] or "" for d in distributions(path=[str(site)]))
    names = (re.sub(r"[-_.]+", "-", name).lower() for name in names)
    return " or ".join(sorted({name for name in names if name.startswith(prefix)})) or None


def _include_folder(library: Path, file: str, folder: str = "") -> Path | None:
    """Return `include/folder` at most three folders above `library`, where include has `file`."""
    for parent in library.parents[:3]:
        if (parent / "include" / file).is_file():
            return parent / "include" / folder
    return None


def _nccl_headers() -> Path | None:
    """Return the folder with the headers of the NCCL in use."""
    used = find_nccl()
    if used is None:
        return None
    beside = _include_folder(used.path, "nccl.h")
    if beside is not None:
        return beside
    packaged = packaged_nccl()
    if packaged is None or used.version is None or packaged.version != used.version:
        return None
    return _include_folder(packaged.path, "nccl.h")
