"""The host's C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

It is compiled here for stand-ins of the CUDA runtime, of NCCL and of the kernels (`sanitized/`,
`fake_nccl.c`), so neither a GPU nor a CUDA toolkit is needed.  What a sanitizer reports ends the
program and fails the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from build_cache import ROOT, cached, run_all, version_of

HERE = Path(__file__).parent / "sanitized"
CSRC = ROOT / "csrc"
FAKE_NCCL = HERE.parent / "fake_nccl.c"
CXX, CC = shutil.which("g++"), shutil.which("gcc")
PROGRAM_S = 300.0  # at most, on a slow and busy machine

pytestmark = [
    pytest.mark.any_python("it compiles the host's C++"),
    pytest.mark.skipif(CXX is None or CC is None, reason="no g++ and gcc on PATH"),
    pytest.mark.skipif(sys.platform != "linux", reason="sanitizers as g++ has them on Linux"),
]

EXCHANGE_CASES = ("threads", "closing", "processes")
LIVES_CASES = ("failures", "order", "calls", "sizes", "growth")

COMMON = ("-O0", "-g1", "-fPIC")
CPP = (*COMMON, "-std=c++17", "-Wall", "-Werror", f"-I{HERE}", f"-I{CSRC}")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Of the memory that ends of one process share, ThreadSanitizer must see one mapping: exchange.cpp.
THREAD = ("-fsanitize=thread", "-DNCCLEP_ONE_MAPPING", "-Dmmap=mmap_once", "-Dmunmap=munmap_once")
EXCHANGE, BINDINGS = CSRC / "host/exchange.cpp", sorted((CSRC / "bindings").glob("*.cpp"))
# Windows of the stand-in for NCCL have no peers to check: window_check.cpp has a test of its own.
ELSEWHERE = {EXCHANGE, CSRC / "native/host/window_check.cpp"}
HOST = sorted({*CSRC.rglob("*.cpp")} - {*BINDINGS} - ELSEWHERE)
STAND_INS = [HERE / "cuda.cpp", HERE / "kernels.cpp"]


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def bindings_options() -> tuple[str, ...]:
    """Options to compile the bindings; without UndefinedBehaviorSanitizer, half the time."""
    pybind11 = pytest.importorskip("pybind11")
    include = sysconfig.get_path("include")
    assert (Path(include) / "Python.h").is_file(), f"no Python.h in {include}: install python-dev"
    return (
        *CPP, "-fsanitize=address", "-fvisibility=hidden", f"-I{include}",
        f"-I{pybind11.get_include()}", '-DNCCLEP_CUDA_VERSION="none"',
        '-DNCCLEP_ARCHITECTURES="none"',
    )  # fmt: skip


@pytest.fixture(scope="module")
def built() -> Path:
    """A folder with the programs `exchange` and `threads`, the extension over the stand-ins
    as _C.so, and a libnccl and libnccl_ep in one as libfake.so.
    """
    options = bindings_options()

    def make(folder: Path) -> None:
        commands: list[list[str | Path]] = []

        def compiled(source: Path, *options: str, suffix: str = "") -> Path:
            target = folder / f"{source.parent.name}_{source.stem}{suffix}.o"
            compiler = CC if source.suffix == ".c" else CXX
            commands.append([str(compiler), *options, "-c", source, "-o", target])
            return target

        # The slowest first.
        extension = [compiled(source, *options) for source in BINDINGS]
        address = {
            source: compiled(source, *CPP, *ADDRESS)
            for source in (*HOST, *STAND_INS, HERE / "exchange.cpp", EXCHANGE)
        }
        thread = {
            source: compiled(source, *CPP, *THREAD, suffix="_threads")
            for source in (HERE / "exchange.cpp", EXCHANGE)
        }
        fake = compiled(
            FAKE_NCCL, *COMMON, *ADDRESS, "-DFAKE_EP_VERSION=200", "-DFAKE_NCCL_VERSION=23007"
        )
        run_all(commands)

        def linked(name: str, objects: list[Path], *options: str) -> list[str | Path]:
            return [str(CXX), *options, *objects, "-o", folder / name, "-ldl", "-lpthread"]

        ends = [address.pop(HERE / "exchange.cpp"), address[EXCHANGE]]
        main = thread.pop(HERE / "exchange.cpp")
        run_all(
            [
                linked("_C.so", [*extension, *address.values()], "-shared", *ADDRESS),
                linked("libfake.so", [fake], "-shared", *ADDRESS),
                linked("exchange", ends, *ADDRESS),
                linked("threads", [main, thread[EXCHANGE]], "-fsanitize=thread"),
            ]
        )

    sources = [*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h"), *HERE.glob("*.[ch]*"), FAKE_NCCL]
    inputs = (*sorted(sources), Path(__file__), version_of(str(CXX)), options)
    return cached("sanitized", inputs, make)


def run_extension(built: Path, script: str, *arguments: str | Path):
    libraries = [
        run([str(CXX), f"-print-file-name={name}"]) for name in ("libasan.so", "libubsan.so")
    ]
    return run(
        [sys.executable, HERE / script, built / "_C.so", built / "libfake.so", *arguments],
        LD_PRELOAD=" ".join(found.stdout.strip() for found in libraries),
        # Leaks are Python's own.  An allocation that is too large fails, as anywhere.
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1",
        PYTHONPATH=str(ROOT),
    )


def run_threads(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    ended = run([program, case])
    if "unexpected memory mapping" in ended.stderr:
        # This kernel spreads addresses more than g++'s ThreadSanitizer can take.
        ended = run(["setarch", "-R", program, case])
    return ended


@pytest.mark.parametrize("case", EXCHANGE_CASES)
@pytest.mark.parametrize("program", ["exchange", "threads"])
def test_exchange(built: Path, program: str, case: str) -> None:
    """Under AddressSanitizer and under ThreadSanitizer."""
    ended = run_threads(built / program, case)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("case", LIVES_CASES)
def test_lives(built: Path, case: str) -> None:
    ended = run_extension(built, "lives.py", case)
    assert ended.returncode == 0, ended.stderr


def test_everything_bound_refuses_hostile_arguments(built: Path) -> None:
    """See `sanitized/hostile.py`.

    Once every check was in the Python engines, and the extension took what it got: None for a
    communicator was a null pointer, a size beyond 64 bits was -1 with Python's error left pending,
    a NaN for a deadline was no deadline, and a closed group waited at address 0.  The engines never
    pass such things, so no test did.
    """
    ended = run_extension(built, "hostile.py")
    assert ended.returncode == 0, f"{ended.stdout[-500:]}\n{ended.stderr}"
