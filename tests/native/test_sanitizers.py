"""The host's C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

It is compiled here for stand-ins of the CUDA runtime, of NCCL and of the kernels (`sanitized/`,
`fake_nccl.c`), so neither a GPU nor a CUDA toolkit is needed.  What a sanitizer reports ends the
program, a leak too, and fails the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "sanitized"
ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CXX, CC = shutil.which("g++"), shutil.which("gcc")
PROGRAM_S = 300.0  # at most, on a slow and busy machine
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMMON = ("-O0", "-g1", "-fPIC")
CPP = ("-std=c++17", "-Wall", "-Werror", f"-I{HERE / 'shim'}", f"-I{HERE}", f"-I{CSRC}")
BINDINGS = sorted((CSRC / "bindings").glob("*.cpp"))
# Windows of the stand-in for NCCL have no peers to check: window_check.cpp has a test of its own.
ELSEWHERE = {CSRC / "host/exchange.cpp", CSRC / "native/host/window_check.cpp"}
HOST_SOURCES = sorted({*CSRC.rglob("*.cpp")} - {*BINDINGS} - ELSEWHERE)
# Of the memory that ends of one process share, ThreadSanitizer must see one mapping: exchange.cpp.
ONE_MAPPING = ("-DNCCLEP_ONE_MAPPING", "-Dmmap=mmap_once", "-Dmunmap=munmap_once")

pytestmark = [
    pytest.mark.any_python("it compiles the host's C++"),
    pytest.mark.skipif(CXX is None or CC is None, reason="no g++ and gcc on PATH"),
    pytest.mark.skipif(sys.platform != "linux", reason="sanitizers as g++ has them on Linux"),
]

EXCHANGE_CASES = (
    "threads", "different_lengths", "closing", "interrupted", "refused", "processes",
    "a_process_dies",
)  # fmt: skip
LIVES_CASES = (
    "windows", "windows_refused", "any_bytes", "nccl_ep", "native_group", "native_low_latency",
    "closed_group", "order", "calls", "sizes", "growth",
)  # fmt: skip
# A program that makes a mistake on purpose, and what must be said of it.
MISTAKES = {
    "mistake_out_of_bounds": "heap-buffer-overflow",
    "mistake_undefined": "signed integer overflow",
    "mistake_leak": "detected memory leaks",
    "mistake_without_order": "a kernel does not wait for the one before",
    "mistake_across_captures": "an event of another capture",
}


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def compile_one(folder: Path, source: Path, *options: str) -> Path:
    """Compile a source file to an object in `folder`; several may have the same name."""
    target = folder / f"{source.parent.name}_{source.stem}.o"
    compiler, language = (CC, ()) if source.suffix == ".c" else (CXX, CPP)
    made = run([str(compiler), *COMMON, *language, *options, "-c", source, "-o", target])
    assert made.returncode == 0, made.stderr
    return target


def link(target: Path, objects: list[Path], *options: str) -> Path:
    made = run([str(CXX), *options, *objects, "-o", target, "-ldl", "-lpthread"])
    assert made.returncode == 0, made.stderr
    return target


def bindings_options() -> tuple[str, ...]:
    """Options to compile the bindings; without UndefinedBehaviorSanitizer, half the time."""
    pybind11 = pytest.importorskip("pybind11")
    include = sysconfig.get_path("include")
    assert (Path(include) / "Python.h").is_file(), f"no Python.h in {include}: install python-dev"
    return (
        "-fsanitize=address", "-fvisibility=hidden", f"-I{include}", f"-I{pybind11.get_include()}",
        '-DNCCLEP_CUDA_VERSION="none"', '-DNCCLEP_ARCHITECTURES="none"',
    )  # fmt: skip


@dataclass(frozen=True)
class Built:
    """Two programs, an extension over the stand-ins, and a libnccl and libnccl_ep in one."""

    exchange: Path
    lives: Path
    extension: Path
    library: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("sanitized")
    fake = HERE.parent / "fake_nccl.c"
    versions = ("-DFAKE_EP_VERSION=200", "-DFAKE_NCCL_VERSION=23007")
    here = {
        name: HERE / f"{name}.cpp" for name in ("cuda", "kernels", "lives", "native", "exchange")
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The slowest first.
        options = bindings_options()
        bindings = [pool.submit(compile_one, folder, source, *options) for source in BINDINGS]
        compiled = partial(compile_one, folder)
        objects = {
            source: pool.submit(compiled, source, *ADDRESS)
            for source in (*here.values(), *HOST_SOURCES, CSRC / "host/exchange.cpp")
        }
        library = pool.submit(compiled, fake, *ADDRESS, *versions)
    host = [objects[source].result() for source in (*HOST_SOURCES, here["cuda"], here["kernels"])]
    extension = [each.result() for each in bindings]
    end = objects[CSRC / "host/exchange.cpp"].result()
    return Built(
        link(folder / "exchange", [objects[here["exchange"]].result(), end], *ADDRESS),
        link(
            folder / "lives",
            [*(objects[here[n]].result() for n in ("lives", "native")), *host],
            *ADDRESS,
        ),
        link(folder / "_C.so", [*extension, end, *host], "-shared", *ADDRESS),
        link(folder / "libfake.so", [library.result()], "-shared", *ADDRESS),
    )


def run_address(built: Built, command: list[str | Path], **more: str):
    # An allocation that is too large fails, as anywhere, and is no mistake.
    options = f"allocator_may_return_null=1:{more.pop('ASAN_OPTIONS', '')}"
    return run(command, ASAN_OPTIONS=options, NCCLEP_FAKE_LIBRARY=str(built.library), **more)


@pytest.mark.parametrize("case", EXCHANGE_CASES)
def test_exchange(built: Built, case: str) -> None:
    ended = run_address(built, [built.exchange, case])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("case", LIVES_CASES)
def test_lives(built: Built, case: str) -> None:
    ended = run_address(built, [built.lives, case])
    assert ended.returncode == 0, ended.stderr


def test_no_case_is_forgotten(built: Built) -> None:
    assert run([built.exchange]).stdout.split() == sorted(EXCHANGE_CASES)
    assert run([built.lives]).stdout.split() == sorted((*LIVES_CASES, *MISTAKES))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported(built: Built, mistake: str) -> None:
    ended = run_address(built, [built.lives, mistake])
    assert ended.returncode != 0
    assert MISTAKES[mistake] in ended.stderr


def test_everything_bound_refuses_hostile_arguments(built: Built, tmp_path: Path) -> None:
    """See `sanitized/hostile.py`.

    Once every check was in the Python engines, and the extension took what it got: None for a
    communicator was a null pointer, a size beyond 64 bits was -1 with Python's error left pending,
    a NaN for a deadline was no deadline, and a closed group waited at address 0.  The engines never
    pass such things, so no test did.
    """
    libraries = [
        run([str(CXX), f"-print-file-name={name}"]) for name in ("libasan.so", "libubsan.so")
    ]
    last_call = tmp_path / "last_call"
    ended = run_address(
        built,
        [sys.executable, HERE / "hostile.py", built.extension, built.library, last_call],
        LD_PRELOAD=" ".join(found.stdout.strip() for found in libraries),
        ASAN_OPTIONS="detect_leaks=0",  # Python's own
        PYTHONPATH=str(ROOT),
    )
    called = last_call.read_bytes().rstrip(b"\0").decode() if last_call.exists() else "none"
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}\nlast call: {called}"


# --- threads -------------------------------------------------------------------------------------


def compile_for_threads(folder: Path, exchange: Path) -> Path:
    """The exchange's program under ThreadSanitizer, with this `exchange.cpp`."""
    options = ("-fsanitize=thread", *ONE_MAPPING)
    objects = [
        compile_one(folder, source, *options) for source in (HERE / "exchange.cpp", exchange)
    ]
    return link(folder / "exchange_threads", objects, "-fsanitize=thread")


def run_threads(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    ended = run([program, case])
    if "unexpected memory mapping" in ended.stderr:
        # This kernel spreads addresses more than g++'s ThreadSanitizer can take.
        ended = run(["setarch", "-R", program, case])
    return ended


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_for_threads(tmp_path_factory.mktemp("threads"), CSRC / "host/exchange.cpp")


@pytest.mark.parametrize("case", EXCHANGE_CASES)
def test_exchange_between_threads(threads: Path, case: str) -> None:
    ended = run_threads(threads, case)
    assert ended.returncode == 0, ended.stderr


def test_a_race_is_reported(tmp_path: Path) -> None:
    """The sequence number without order: a message may be read before its bytes are there."""
    text = (CSRC / "host/exchange.cpp").read_text(encoding="utf-8")
    order = "own.sequence.store(sequence_, std::memory_order_release)"
    assert text.count(order) == 1
    changed = tmp_path / "host" / "exchange.cpp"
    changed.parent.mkdir()
    changed.write_text(text.replace(order, order.replace("release", "relaxed")), encoding="utf-8")
    ended = run_threads(compile_for_threads(tmp_path, changed), "threads")
    assert ended.returncode != 0
    assert "data race" in ended.stderr
