"""Builds the package; everything declarative is in pyproject.toml.

`configs/` is at the top of the tree, where users look for it, and is installed as package data
under `megatron_ncclep/configs`, where `megatron_ncclep.cli.render` finds it.

The extension `megatron_ncclep._C` and the C library `megatron_ncclep/libncclep.so` (csrc/) are
built where there is a CUDA toolkit; elsewhere the package is pure Python and has the reference
engine only.  They need no GPU and no torch to build.  Both are linked from the same objects, so
neither needs the other at run time.  `csrc/include/` is installed as `megatron_ncclep/include`.

Environment:
    CUDA_HOME                    the toolkit (default: /usr/local/cuda, else where nvcc is on PATH)
    NCCLEP_BUILD_EXTENSION       1: fail without a toolkit; 0: do not build; default: build if there
                                 is one
    NCCLEP_CUDA_ARCHITECTURES    GPU architectures, separated by spaces: 90 is machine code for
                                 sm_90, 90+PTX also has PTX, which drivers compile for newer GPUs
                                 (default: 90+PTX, and 100 if the toolkit is 12.8 or newer)
    NCCL_HOME                    a folder whose include/ has the headers of NCCL 2.30.7 or newer
                                 (default: those of a wheel of NCCL in this environment); without
                                 them there are no kernels over a network
"""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
EXTENSION = "megatron_ncclep._C"
LIBRARY = "megatron_ncclep.libncclep"
# The kernels for NVLink domains of more than 32 GPUs, and the oldest architecture that has such:
# they are the other kernels once more, so a library for older GPUs would be twice as large.
WIDE, WIDE_FROM = SOURCES / "native" / "wide", 100
# The experts' FP8 products, which only the extension has, use what only Hopper has.
HOPPER, HOPPER_NAMES = SOURCES / "experts", {"sm_90", "sm_90a"}
HOPPER_OPTIONS = ["-gencode", "arch=compute_90a,code=sm_90a"]
NCCL_VERSION = (2, 30, 7)  # of the headers, at least: what is compiled with them needs no older one


def cuda_home():
    """The folder of the CUDA toolkit, or None."""
    on_path = shutil.which("nvcc")
    given = os.environ.get("CUDA_HOME")
    candidates = [Path(given or "/usr/local/cuda")]
    candidates += [Path(on_path).resolve().parents[1]] if on_path and not given else []
    for home in candidates:
        if (home / "bin" / "nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    if given:
        raise SystemExit(
            f"CUDA_HOME={given}: no toolkit with bin/nvcc and its headers: correct or unset it, or "
            "leave the extension out with NCCLEP_BUILD_EXTENSION=0"
        )
    return None


def toolkit_version(home):
    """The version of a CUDA toolkit, such as (13, 0)."""
    told = subprocess.run(
        [home / "bin" / "nvcc", "--version"], check=True, text=True, capture_output=True
    ).stdout
    return tuple(map(int, re.search(r"release (\d+)\.(\d+)", told).groups()))


def nccl_headers():
    """The folder of NCCL's headers and their version; (None, "") if none are new enough."""
    # A build that pip isolates does not import from this environment, but knows where it is.
    wheel = Path(sysconfig.get_path("purelib"), "nvidia/nccl")
    include = Path(os.environ.get("NCCL_HOME") or wheel) / "include"
    found = "no nccl_device.h"
    if (include / "nccl_device.h").is_file():
        text = (include / "nccl.h").read_text()
        version = tuple(
            int(re.search(rf"define NCCL_{part} +(\d+)", text)[1])
            for part in ("MAJOR", "MINOR", "PATCH")
        )
        if version >= NCCL_VERSION:
            return include, "{}.{}.{}".format(*version)
        found = "NCCL {}.{}.{}".format(*version)
    wanted = "{}.{}.{}".format(*NCCL_VERSION)
    print(f"{include} has {found}: without NCCL {wanted} (NCCL_HOME), no kernels over a network")
    return None, ""


def targets(version, least=0):
    """nvcc's targets from `least` on: its -gencode options, and the names of what they make."""
    asked = os.environ.get("NCCLEP_CUDA_ARCHITECTURES", "").split()
    options, names = [], []
    for architecture in asked or ["90+PTX", *(["100"] if version >= (12, 8) else [])]:
        number, plus, ptx = architecture.partition("+")
        if plus and ptx != "PTX":
            raise SystemExit(
                f"NCCLEP_CUDA_ARCHITECTURES: {architecture!r}: write 90, or 90+PTX for PTX too"
            )
        if int(re.sub(r"\D", "", number) or least) < least:
            continue
        made = [f"sm_{number}", *([f"compute_{number}"] if ptx else [])]
        options += ["-gencode", f"arch=compute_{number},code=[{','.join(made)}]"]
        names += made
    return options, names


def clock_of_files():
    """The time for what is made from files as they are now: what changes later is newer.

    In ns.  Kernels give files the time of their clock's last tick, up to 10 ms ago.
    """
    return time.time_ns() - 10**7


class BuildExtension(build_ext):
    """Compiles csrc/**/*.cu with nvcc and the rest with the host compiler."""

    def get_ext_filename(self, fullname):
        """The file of an extension; the C library's has no Python in its name."""
        if fullname.rpartition(".")[2] == LIBRARY.rpartition(".")[2]:
            return os.path.join(*fullname.split(".")) + ".so"
        # A Python names its own processor, also where _PYTHON_HOST_PLATFORM names another.
        target = self.plat_name.rpartition("-")[2]
        return super().get_ext_filename(fullname).replace(platform.machine(), target)

    def build_extensions(self):
        """Add the settings that depend on the toolkit, then build as setuptools does."""
        begin = clock_of_files()
        home = cuda_home()
        version = toolkit_version(home)
        options, names = targets(version)
        wide, _ = targets(version, WIDE_FROM)
        hopper = HOPPER_OPTIONS if HOPPER_NAMES.intersection(names) else []
        dotted, names = "{}.{}".format(*version), " ".join(names)
        (include, nccl), headers = nccl_headers(), []
        if include is not None:
            headers = ["-I", str(include), "-DNCCLEP_NCCL_HEADERS"]
        library, extension = self.extensions
        forced = self.force
        if self.is_built(library, extension, f"CUDA {dotted} for {names} with NCCL {nccl}"):
            return
        # The largest first, and what includes them: they take longest, and if they came last a core
        # would be idle.
        kernels = sorted(
            SOURCES.rglob("*.cu"), key=lambda path: (path.parent != WIDE, -path.stat().st_size)
        )
        special = {WIDE: wide, HOPPER: hopper}
        kernels = [path for path in kernels if special.get(path.parent, options)]
        # Kernels know nothing of Python: wheels for several Pythons share their objects.
        name = re.sub(r"[^\w.]+", "-", f"kernels {self.plat_name} {dotted} {names} {nccl}")
        folder = Path(self.build_temp).parent / name.strip("-")
        print(f"compiling {len(kernels)} files with CUDA {dotted}", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [headers + special.get(path.parent, options) for path in kernels]
            make = partial(self.compile_kernels, home, folder, forced)
            objects = dict(zip(kernels, pool.map(make, commands, kernels), strict=True))
        for ext in self.extensions:
            ext.define_macros += [
                ("NCCLEP_CUDA_VERSION", f'"{dotted}"'),
                ("NCCLEP_ARCHITECTURES", f'"{names}"'),
                ("NCCLEP_NCCL_VERSION", f'"{nccl}"'),
                *([("NCCLEP_WIDE_DOMAINS", "1")] if wide else []),
                *([("NCCLEP_FP8_EXPERTS", "1")] if hopper else []),
            ]
            ext.include_dirs += [str(SOURCES), str(home / "include")]
            # Toolkits from pip have their libraries in lib/.
            ext.library_dirs += [str(home / "lib64"), str(home / "lib")]
            ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
            ext.extra_objects += [
                made for path, made in objects.items() if ext is extension or path.parent != HOPPER
            ]
        # The extension is linked from the library's objects, which are compiled first.
        extension.extra_objects += self.compiler.object_filenames(
            library.sources, output_dir=self.build_temp
        )
        with ParallelCompile():
            for ext in self.extensions:
                self.build_extension(ext)
                os.utime(self.get_ext_fullpath(ext.name), ns=(begin, begin))

    def is_built(self, library, extension, built_with):
        """Whether both files are newer than their sources, and built for the same GPUs."""
        files = [Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions]
        if not all(path.exists() for path in files):
            self.force = True  # objects of an earlier build may be gone
            return False
        # The file contains its toolkit, architectures and NCCL; see kBuiltWith in
        # csrc/bindings/module.cpp.
        self.force = self.force or f"{built_with}\0".encode() not in files[1].read_bytes()
        sources = library.sources + extension.sources + extension.depends
        self.force = self.force or any(newer_group(sources, str(f), "newer") for f in files)
        if not self.force:
            print(f"{files[1]} is newer than its sources")
        return not self.force

    def compile_kernels(self, home, folder, forced, options, source):
        """Compile one .cu file to an object file, if it is older than the sources."""
        target = folder / source.relative_to(SOURCES).with_suffix(".cu.o")
        includes = SOURCES.rglob("*.*[hu]" if source.parent == WIDE else "*.*h")
        newest = max(path.stat().st_mtime for path in [source, *includes])
        if forced or not target.exists() or target.stat().st_mtime < newest:
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_suffix(".part.o")  # an interrupted one must not look finished
            command = [home / "bin" / "nvcc", "-c", source, "-o", unfinished, "-I", SOURCES]
            command += ["-O3", "-std=c++17", "--compiler-options", "-fPIC,-fvisibility=hidden"]
            command += options
            begin = clock_of_files()
            subprocess.run(command, check=True)
            os.utime(unfinished, ns=(begin, begin))
            unfinished.replace(target)
            took = (clock_of_files() - begin) / 1e9
            print(f"{source.relative_to(ROOT)}: {took:.0f} s", flush=True)
        return str(target)


def long_description():
    """README.md for an index's page, where links need the address of this version's files."""
    project = (ROOT / "pyproject.toml").read_text()
    address = re.search('^Repository = "(.+)"$', project, re.MULTILINE)[1]
    version = runpy.run_path(ROOT / "megatron_ncclep" / "version.py")["__version__"]
    files = f"]({address}/blob/v{version}/"
    linked = re.sub(r"\]\((?!https?:|#)", files, (ROOT / "README.md").read_text())
    return linked.replace(".svg)", ".svg?raw=true)")


def extensions():
    """The library and the extension; neither if the environment or the machine rules them out."""
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
    sources = {str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.cpp")}
    bindings = {str(path.relative_to(ROOT)) for path in (SOURCES / "bindings").glob("*.cpp")}
    # After any change, even of a kernel, everything is linked again.
    everything = [str(path.relative_to(ROOT)) for path in SOURCES.rglob("*.*")]
    flags = ["-std=c++17", "-fvisibility=hidden", "-g0"]
    return [
        Extension(LIBRARY, sorted(sources - bindings), extra_compile_args=flags),
        Pybind11Extension(
            EXTENSION,
            sorted(bindings),
            cxx_std=17,
            depends=everything,
            # Its own functions, even if a program has loaded libncclep.so.
            extra_link_args=["-Wl,-Bsymbolic"],
        ),
    ]


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
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
        "megatron_ncclep.integration.rerun",
        "megatron_ncclep.libraries",
        "megatron_ncclep.ops",
        "megatron_ncclep.ranks",
        "megatron_ncclep.serving",
        "megatron_ncclep.sglang",
        "megatron_ncclep.training",
        "megatron_ncclep.vllm",
        "megatron_ncclep.configs",
        "megatron_ncclep.include",
    ],
    package_dir={
        "megatron_ncclep": "megatron_ncclep",
        "megatron_ncclep.configs": "configs",
        "megatron_ncclep.include": "csrc/include",
    },
    package_data={
        "megatron_ncclep": ["py.typed", "*.pyi"],
        "megatron_ncclep.configs": ["*/*.yaml"],
        "megatron_ncclep.include": ["*.h"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
)
