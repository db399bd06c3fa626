"""Compiles C programs with the C library, as one outside this package would be."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import megatron_ncclep

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "csrc" / "include" / "ncclep.h"
LIBRARY = Path(megatron_ncclep.__path__[0]) / "libncclep.so"
EXAMPLE = ROOT / "examples" / "dispatch_combine.c"
CC = shutil.which("gcc")


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), text=True, capture_output=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip


def build(target: Path, source: Path, *options: Any) -> Path:
    """Compile a C program with the library."""
    link = (f"-L{LIBRARY.parent}", "-lncclep", f"-Wl,-rpath,{LIBRARY.parent}")
    made = run(CC, "-std=c99", f"-I{HEADER.parent}", source, *options, *link, "-o", target)
    assert made.returncode == 0, made.stderr
    return target


def build_example(target: Path) -> Path:
    """Compile the example, which also calls the CUDA runtime, of a toolkit or of pip."""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda")]
    homes += [str(f) for p in ("cu13", "cuda_runtime") for f in _pip_folders(p)]
    home = next((h for h in homes if Path(h, "include/cuda_runtime_api.h").is_file()), None)
    assert home is not None, f"no cuda_runtime_api.h in {homes}: set CUDA_HOME to a toolkit"
    folders = [f"{home}/lib64", f"{home}/lib"]
    static = ("-lcudart_static", "-ldl", "-lrt", "-lpthread")
    if not any(Path(folder, "libcudart_static.a").is_file() for folder in folders):
        (runtime,) = (r for f in folders for r in sorted(Path(f).glob("libcudart.so.*"))[:1])
        static = (str(runtime), f"-Wl,-rpath,{runtime.parent}", "-lpthread", "-ldl")
    warnings = ("-Wall", "-Wextra", "-Werror")
    where = (f"-I{home}/include", *(f"-L{folder}" for folder in folders))
    return build(target, EXAMPLE, *warnings, *where, *static)


def _pip_folders(package: str) -> list[Path]:
    """Folders of NVIDIA's packages called so."""
    found = importlib.util.find_spec("nvidia")
    folders = () if found is None else found.submodule_search_locations or ()
    return [Path(folder, package) for folder in folders]
