"""Finds NCCL, which engines need at run time, and the compiler that NVIDIA's libnccl_ep calls.

Nothing here opens a library in this process, and nothing is collective.  "Loaded" means at the time
of the call, so import torch first: that loads the NCCL that torch was installed with.
"""

from __future__ import annotations

import ctypes
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
# The engine `native` needs NCCL's windows and LSA pointers in the form that they have since this
# version.
OLDEST_NCCL: Version = (2, 28, 9)

# Deadline in seconds of a process that only opens a library.
PROBE_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Library:
    """A shared library on this machine.

    Attributes:
        path: path of the file.
        version: the version that the library reports; None if it does not.
        found: text on how it was found.
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
    one in NVIDIA's package, the one that the system's loader finds.

    Raises:
        InputError: NCCLEP_NCCL_LIBRARY names a nonexistent file.
    """
    chosen = named("NCCLEP_NCCL_LIBRARY")
    loaded = loaded_nccl()
    if chosen is None:
        return loaded or packaged_nccl() or system_nccl()
    if loaded is not None and chosen.resolve() == loaded.path:
        return Library(chosen, loaded.version, "NCCLEP_NCCL_LIBRARY, loaded in this process")
    return Library(chosen, _probe(chosen)[0], "NCCLEP_NCCL_LIBRARY")


def loaded_nccl() -> Library | None:
    """Return the NCCL that this process has loaded, or None.

    If there are several, it is the first: the one that a library that needs libnccl.so.2 gets.
    """
    try:
        # By name and with NOLOAD, the loader only returns a library that it already has.
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
    for folder in package_folders("nvidia"):
        path = folder / "nccl" / "lib" / NCCL
        if path.is_file():
            owner = distribution(folder.parent, "nvidia-nccl-")
            return Library(path, _probe(path)[0], f"package {owner or 'nvidia'}")
    return None


def system_nccl() -> Library | None:
    """Return the NCCL that the system's loader finds by its name alone, or None."""
    version, path = _probe(NCCL)
    return None if path is None else Library(path, version, "the system's loader")


def nccl_package() -> str:
    """The name of NVIDIA's package with the NCCL for torch's CUDA."""
    return f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"


def nccl_version(code: int) -> Version:
    """The version for ncclGetVersion's `code`: 23007 is 2.30.7, and 2804 was 2.8.4."""
    base = 1000 if code < 10000 else 10000
    return code // base, code % base // 100, code % 100


def mapped_file(maps: str, address: int) -> Path | None:
    """Return the file that `maps`, the text of /proc/PID/maps, shows at `address`."""
    for line in maps.splitlines():
        # start-end permissions offset device inode path; the path may contain spaces, or be
        # missing.
        span, *rest = line.split(None, 5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end and len(rest) == 5:
            # A file that was replaced since, for example by an update, is marked.
            return Path(rest[-1].removesuffix(" (deleted)"))
    return None


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


def _probe(library: Path | str) -> tuple[Version | None, Path | None]:
    """Ask a libnccl.so.2 for its version and its path, in a separate process; None if it fails.

    If it were opened here, even with RTLD_LOCAL, it would become the libnccl.so.2 of this process:
    the loader answers every later request for that name with the library that it has, so torch
    would get this one instead of its own.  The package's metadata is not a substitute: -cu12 and
    -cu13 install the same file, and the last one wins.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE, str(library)],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return None, None
    if done.returncode != 0:  # no such library, or one with missing dependencies
        return None, None
    answer, _, maps = done.stdout.partition("\n")
    code, address = map(int, answer.split())
    return nccl_version(code) if code >= 0 else None, mapped_file(maps, address)


# --- the compiler -------------------------------------------------------------------------------


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


def named(variable: str) -> Path | None:
    """Return the path that an environment variable holds; it must exist."""
    path: Path | None = envs.get(variable)
    return None if path is None else existing(variable, path)


def existing(variable: str, path: Path) -> Path:
    """Return `path`, which `variable` names.

    Raises:
        InputError: there is no such file or folder.
    """
    if not path.exists():
        raise InputError(
            f"{variable}={path}: there is no such file or folder; correct the path, or unset the "
            "variable to use the default search"
        )
    return path


def package_folders(package: str) -> Iterator[Path]:
    """Yield the folders of the top-level `package` on Python's path; imports nothing.

    Several distributions share `nvidia` and `nccl`, so each may have folders in several places.
    """
    # Not importlib.util.find_spec: it trusts any module of that name in sys.modules.
    spec = PathFinder.find_spec(package)
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            yield Path(folder)


def distribution(site: Path, prefix: str) -> str | None:
    """Return the name of the distribution in the folder `site` that starts with `prefix`.

    If there are several, it is unknown whose file it is, and all names are returned.
    """
    names = (d.metadata["Name"] or "" for d in distributions(path=[str(site)]))
    names = (re.sub(r"[-_.]+", "-", name).lower() for name in names)
    return " or ".join(sorted({name for name in names if name.startswith(prefix)})) or None


def nccl_headers() -> Path | None:
    """Return the folder with the headers of the NCCL in use: next to it, or in NVIDIA's package."""
    used = find_nccl()
    if used is None:
        return None
    nearby = _headers_of(used)
    if nearby is not None:
        return nearby
    packaged = packaged_nccl()
    if packaged is None or used.version is None or packaged.version != used.version:
        return None
    return _headers_of(packaged)


def _headers_of(nccl: Library) -> Path | None:
    """Return `include` at most three folders above a libnccl.so.2, where it has nccl.h."""
    folders = (parent / "include" for parent in nccl.path.parents[:3])
    return next((folder for folder in folders if (folder / "nccl.h").is_file()), None)
