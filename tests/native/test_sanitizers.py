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
# A mistake on purpose, and what must be said of it.
MISTAKES = {
    "mistake_out_of_bounds": "heap-buffer-overflow",
    "mistake_undefined": "signed integer overflow",
    "mistake_leak": "a leak",
    "mistake_heap_leak": "a leak of 7 bytes",
    "mistake_without_order": "a kernel does not wait for the one before",
    "mistake_across_captures": "an event of another capture",
}

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
# The sequence number without order: a message may be read before its bytes are there.
ORDER = "own.sequence.store(sequence_, std::memory_order_release)"


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
    """A folder with the programs `exchange`, `threads` and `race`, the extension over the stand-ins
    as _C.so, and a libnccl and libnccl_ep in one as libfake.so.
    """
    options = bindings_options()
    text = EXCHANGE.read_text(encoding="utf-8")
    assert text.count(ORDER) == 1, f"{EXCHANGE} has {ORDER!r} once"

    def make(folder: Path) -> None:
        race = folder / "exchange_race.cpp"
        race.write_text(text.replace(ORDER, ORDER.replace("release", "relaxed")), encoding="utf-8")
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
            for source in (HERE / "exchange.cpp", EXCHANGE, race)
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
                linked("race", [main, thread[race]], "-fsanitize=thread"),
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


def test_no_case_is_forgotten(built: Path) -> None:
    assert run([built / "exchange"]).stdout.split() == sorted(EXCHANGE_CASES)


def test_a_race_is_reported(built: Path) -> None:
    ended = run_threads(built / "race", "threads")
    assert ended.returncode != 0
    assert "data race" in ended.stderr


@pytest.mark.parametrize("case", LIVES_CASES)
def test_lives(built: Path, case: str) -> None:
    ended = run_extension(built, "lives.py", case)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported(built: Path, mistake: str) -> None:
    ended = run_extension(built, "lives.py", mistake)
    assert ended.returncode != 0
    assert MISTAKES[mistake] in ended.stderr


def test_everything_bound_refuses_hostile_arguments(built: Path, tmp_path: Path) -> None:
    """See `sanitized/hostile.py`.

    Once every check was in the Python engines, and the extension took what it got: None for a
    communicator was a null pointer, a size beyond 64 bits was -1 with Python's error left pending,
    a NaN for a deadline was no deadline, and a closed group waited at address 0.  The engines never
    pass such things, so no test did.
    """
    last_call = tmp_path / "last_call"
    ended = run_extension(built, "hostile.py", last_call)
    called = last_call.read_bytes().rstrip(b"\0").decode() if last_call.exists() else "none"
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}\nlast call: {called}"
