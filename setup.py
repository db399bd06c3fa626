"""Builds the package; everything declarative is in pyproject.toml.

`configs/` lives at the top of the tree, where people look for it, and is installed as package data
under `megatron_ncclep/configs`, where `megatron_ncclep.cli.render` finds it again.

The extension `megatron_ncclep._C` (csrc/) is built where there is a CUDA toolkit; elsewhere the
package is pure Python and has the reference engine only.  It needs no GPU and no torch to build.

Environment:
    CUDA_HOME                    the toolkit (default: /usr/local/cuda, else where nvcc is on PATH)
    NCCLEP_BUILD_EXTENSION       1: fail without a toolkit; 0: do not build; default: build if there
                                 is one
    NCCLEP_CUDA_ARCHITECTURES    GPU architectures, separated by spaces: 90 is machine code for
                                 sm_90, 90+PTX has PTX beside it, which drivers compile for newer
                                 GPUs (default: 90+PTX, and 100 where the toolkit is 12.8 or newer)
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
EXTENSION = "megatron_ncclep._C"


def cuda_home():
    """The folder of the CUDA toolkit, or None."""
    on_path = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates += [Path(on_path).resolve().parents[1]] if on_path else []
    for candidate in candidates:
        home = Path(candidate) if candidate else None
        if home and (home / "bin" / "nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    return None


def toolkit_version(home):
    """The version of a CUDA toolkit, (13, 0) say."""
    told = subprocess.run(
        [home / "bin" / "nvcc", "--version"], check=True, text=True, capture_output=True
    ).stdout
    return tuple(map(int, re.search(r"release (\d+)\.(\d+)", told).groups()))


def targets(version):
    """What nvcc compiles for: its -gencode options, and the names of the code that they make."""
    asked = os.environ.get("NCCLEP_CUDA_ARCHITECTURES", "").split()
    options, names = [], []
    for architecture in asked or ["90+PTX", *(["100"] if version >= (12, 8) else [])]:
        number, plus, ptx = architecture.partition("+")
        if plus and ptx != "PTX":
            raise SystemExit(
                f"NCCLEP_CUDA_ARCHITECTURES: {architecture!r}: write 90, or 90+PTX for PTX too"
            )
        made = [f"sm_{number}", *([f"compute_{number}"] if ptx else [])]
        options += ["-gencode", f"arch=compute_{number},code=[{','.join(made)}]"]
        names += made
    return options, names


class BuildExtension(build_ext):
    """Compiles csrc/**/*.cu with nvcc and the rest with the host compiler."""

    def build_extension(self, ext):
        """Add what only the toolkit knows, then build as setuptools does."""
        home = cuda_home()
        version = toolkit_version(home)
        options, names = targets(version)
        dotted, names = "{}.{}".format(*version), " ".join(names)
        ext.define_macros += [
            ("NCCLEP_CUDA_VERSION", f'"{dotted}"'),
            ("NCCLEP_ARCHITECTURES", f'"{names}"'),
        ]
        built = Path(self.get_ext_fullpath(ext.name))
        if built.exists():
            content = built.read_bytes()
            # It says what it was built with, and for; see kBuiltWith in csrc/bindings/module.cpp.
            self.force = self.force or f"CUDA {dotted} for {names}\0".encode() not in content
            if not (self.force or newer_group(ext.sources + ext.depends, str(built), "newer")):
                print(f"{built} is newer than its sources")
                return
        ext.include_dirs += [str(SOURCES), str(home / "include")]
        # Toolkits from pip have their libraries in lib/.
        ext.library_dirs += [str(home / "lib64"), str(home / "lib")]
        ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
        kernels = sorted(SOURCES.rglob("*.cu"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects += pool.map(partial(self.compile_kernels, home, options), kernels)
        with ParallelCompile():
            super().build_extension(ext)

    def compile_kernels(self, home, options, source):
        """Compile one .cu file to an object file, if it is older than the sources."""
        folder = Path(self.build_temp) / source.relative_to(ROOT).parent
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{source.stem}.cu.o"
        newest = max(path.stat().st_mtime for path in [source, *SOURCES.rglob("*.*h")])
        if not target.exists() or target.stat().st_mtime < newest or self.force:
            command = [home / "bin" / "nvcc", "-c", source, "-o", target, "-I", SOURCES]
            command += ["-O3", "-std=c++17", "--compiler-options", "-fPIC,-fvisibility=hidden"]
            command += options
            print(" ".join(map(str, command)), flush=True)
            subprocess.run(command, check=True)
        return str(target)


def extensions():
    """The extension, unless the environment or the machine says that there is none."""
    wanted = os.environ.get("NCCLEP_BUILD_EXTENSION", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"NCCLEP_BUILD_EXTENSION={wanted!r}: must be 0 or 1, or left out")
    if wanted == "0":
        return []
    if cuda_home() is None:
        message = "no CUDA toolkit found (set CUDA_HOME to one that has nvcc)"
        if wanted == "1":
            raise SystemExit(f"NCCLEP_BUILD_EXTENSION=1, but {message}")
        print(f"{message}: building the pure-Python package, with the reference engine only")
        return []
    sources = sorted(str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.cpp"))
    # Whatever changes, kernels included, the extension is linked again.
    everything = [str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.*")]
    return [Pybind11Extension(EXTENSION, sources, cxx_std=17, depends=everything)]


setup(
    packages=[
        "megatron_ncclep",
        "megatron_ncclep.benchmark",
        "megatron_ncclep.cli",
        "megatron_ncclep.cpu",
        "megatron_ncclep.doctor",
        "megatron_ncclep.engines",
        "megatron_ncclep.engines.hierarchical",
        "megatron_ncclep.engines.native",
        "megatron_ncclep.engines.nccl_ep",
        "megatron_ncclep.engines.reference",
        "megatron_ncclep.integration",
        "megatron_ncclep.integration.checks",
        "megatron_ncclep.integration.experts",
        "megatron_ncclep.integration.inference",
        "megatron_ncclep.integration.options",
        "megatron_ncclep.libraries",
        "megatron_ncclep.ops",
        "megatron_ncclep.ranks",
        "megatron_ncclep.testing",
        "megatron_ncclep.training",
        "megatron_ncclep.configs",
    ],
    package_dir={"megatron_ncclep": "megatron_ncclep", "megatron_ncclep.configs": "configs"},
    package_data={"megatron_ncclep": ["py.typed"], "megatron_ncclep.configs": ["*/*.yaml"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
)
