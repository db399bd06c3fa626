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
from pathlib import Path

import pytest
from build_cache import ROOT, cached, run_all, version_of
from emulation.translate import Change, apply_changes

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

COMMON = ("-O0", "-g1", "-fPIC")
CPP = (*COMMON, "-std=c++17", "-Wall", "-Werror", f"-I{HERE}", f"-I{CSRC}")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Of the memory that ends of one process share, ThreadSanitizer must see one mapping: exchange.cpp.
THREAD = ("-fsanitize=thread", "-DNCCLEP_ONE_MAPPING", "-Dmmap=mmap_once", "-Dmunmap=munmap_once")
EXCHANGE = [HERE / "exchange.cpp", CSRC / "host/exchange.cpp"]
# Windows of the stand-in for NCCL have no peers to check: window_check.cpp has a test of its own.
HOST = [
    *(HERE / f"{name}.cpp"
      for name in ("host", "windows", "versions", "kernels", "network", "cuda")),
    *(path for name in ("c_interface", "common", "native", "nccl")
      for path in sorted((CSRC / name).rglob("*.cpp")) if path.stem != "window_check"),
]  # fmt: skip

# Of the case `domains`: what is changed (emulation/translate.py), and what is said then.
# fmt: off
MISTAKES = {
    "new windows are taken to have received the last plan": (Change(
        "native/host/group.cpp",
        "clear_memory(&state_->received, sizeof(state_->received));", ""),
        "launched.received == 0"),
    "rounds are those of the windows before": (Change(
        "native/host/group.cpp", "num_rounds_for(control, «shape.row_bytes»,", "std::size_t{0}"),
        "launched.num_rounds > 1"),
    "a group closes while something is on its way": (Change(
        "native/host/group.cpp", "longest_timeout_s_);\n  «drain_network();»", ""),
        "launched.num_closes == before"),
    "routes for other domains are not copied": (Change(
        "native/host/group_launch.cpp", "if («kept > 0») {", "false"),
        "routes for other domains are lost"),
    "a dispatch's phases are those of this rank's tokens": (Change(
        "native/host/group_launch.cpp",
        "job.num_phases = num_phases_of(std::min(«job.most_tokens», control_.round_tokens()), "
        "job.row_bytes);", "job.num_tokens"),
        "launched.num_phases > 1"),
    "a combine's phases are those of this rank's tokens": (Change(
        "native/host/group_launch.cpp",
        "num_phases_of(std::min(«job.most_tokens», control_.round_tokens()), job.row_bytes);\n"
        "    job.rail_routes", "job.num_tokens"),
        "launched.num_phases > 1"),
}
# fmt: on


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def built() -> Path:
    """A folder with the programs `host`, `exchange` and `threads`, and libfake.so, a libnccl."""

    def make(folder: Path) -> None:
        commands: list[list[str | Path]] = []

        def compiled(sources: list[Path], *options: str, suffix: str = "") -> list[Path]:
            targets = [folder / f"{path.parent.name}_{path.stem}{suffix}.o" for path in sources]
            commands.extend(
                [str(CXX), *CPP, *options, "-c", source, "-o", target]
                for source, target in zip(sources, targets, strict=True)
            )
            return targets

        changes = [change for change, _ in MISTAKES.values()]
        changed = {CSRC / change.file: folder / Path(change.file).name for change in changes}
        for source, target in changed.items():
            name = str(source.relative_to(CSRC))
            target.write_text(apply_changes(name, source.read_text(), changes))
        sources = [changed.get(path, path) for path in HOST]
        host = compiled(sources, *ADDRESS, "-include", str(HERE / "standin.h"))
        exchange = compiled(EXCHANGE, *ADDRESS)
        threads = compiled(EXCHANGE, *THREAD, suffix="_threads")
        fake = folder / "libfake.so"
        versions = ("-DFAKE_EP_VERSION=200", "-DFAKE_NCCL_VERSION=23007")
        commands.append([str(CC), *COMMON, *ADDRESS, *versions, "-shared", FAKE_NCCL, "-o", fake])
        run_all(commands)
        end = ("-ldl", "-lpthread", "-Wl,-rpath,$ORIGIN")
        run_all([
            [str(CXX), *ADDRESS, *host, f"-L{folder}", "-lfake", "-o", folder / "host", *end],
            [str(CXX), *ADDRESS, *exchange, "-o", folder / "exchange", *end],
            [str(CXX), "-fsanitize=thread", *threads, "-o", folder / "threads", *end],
        ])  # fmt: skip

    sources = [*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h"), *HERE.glob("*.[ch]*"), FAKE_NCCL]
    translate = HERE.parent / "emulation" / "translate.py"
    inputs = (*sorted(sources), translate, Path(__file__), version_of(str(CXX)))
    return cached("sanitized", inputs, make)


@pytest.mark.parametrize("case", ["threads", "closing"])
@pytest.mark.parametrize("program", ["exchange", "threads"])
def test_exchange(built: Path, program: str, case: str) -> None:
    """Under AddressSanitizer and under ThreadSanitizer."""
    ended = run([built / program, case])
    if "unexpected memory mapping" in ended.stderr:
        # This kernel spreads addresses more than g++'s ThreadSanitizer can take.
        ended = run(["setarch", "-R", built / program, case])
    assert ended.returncode == 0, ended.stderr


CASES = [
    "failures",
    "order",
    "sizes",
    "late",
    "growth",
    "waiting",
    "results",
    "arguments",
    "domains",
    "versions",
    "phases",
]


@pytest.mark.parametrize("case", CASES)
def test_host(built: Path, case: str) -> None:
    """In `failures` every call of NCCL and of CUDA fails once; nothing is left then.

    The other cases are about what the host does for kernels: what it passes, who waits for whom,
    and what they are told.  In `arguments` each argument is wrong once: the extension took what it
    got, and waited at address 0.
    """
    # Windows that are open after a failed step stay on purpose; the program counts what else does.
    ended = run([built / "host", case, built / "libfake.so"], ASAN_OPTIONS="detect_leaks=0")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_several_domains_are_noticed(built: Path, name: str) -> None:
    """Five at once were made in the host, and no test failed: all cases had one domain."""
    number = list(MISTAKES).index(name)
    ended = run(
        [built / "host", "domains", built / "libfake.so", str(number)],
        ASAN_OPTIONS="detect_leaks=0",
    )
    assert ended.returncode != 0
    assert ended.stderr.startswith("FAILED: ")
    assert MISTAKES[name][1] in ended.stderr
