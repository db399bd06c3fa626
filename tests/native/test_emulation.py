"""The native engine's kernels on an emulated GPU: what waits for what, and which bits come out.

Random sequences of plans, dispatches and combines run on every rank at its own pace, under random
schedules (`emulation/`), and are held against an oracle.  Then the kernels are broken on purpose,
in ways that a GPU would forgive most of the time, and that must be noticed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulation.translate import translate

HERE = Path(__file__).parent / "emulation"
CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")
NUM_SEQUENCES = 8
SEQUENCE_S = 60.0  # at most, on a slow and busy machine

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (c++ or g++) on PATH"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are for Linux"),
]

# What is changed: file, text, replacement; and with how many ranks it shows.
MISTAKES = {
    "a count is not reset": ("pairs.cuh", "    counts[group[i]] = 0;\n", "", 2),
    "own rows come before two parts": ("combine.cu", "parts_before < 2", "parts_before < 3", 4),
    "both dispatches use one half of the window": (
        "dispatch.cu",
        "parity = dispatches % 2;",
        "parity = 0;",
        2,
    ),
    "rows are staged while the dispatch before the last is pulled": (
        "dispatch.cu",
        "kEntered, thread), last);",
        "kEntered, thread), 0);",
        2,
    ),
    "sums are sent before their rank has entered": (
        "combine.cu",
        "bool has_entered = !sends;",
        "bool has_entered = true;",
        2,
    ),
    "rows are added up before they are there": (
        "add_up.cuh",
        "wait_for_copies<kStages - 2>();",
        "wait_for_copies<kStages - 1>();",
        2,
    ),
    "a stage is loaded while it is being stored": (
        "ring.cuh",
        "wait_for_reads_of_stores<1>();",
        "wait_for_reads_of_stores<2>();",
        2,
    ),
    "more phases are taken for seen than are": (
        "progress.cuh",
        "kWarpSize : __ffs(absent) - 1;",
        "kWarpSize : __ffs(absent);",
        2,
    ),
}


def compile_rounds(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Compile the kernels, changed, and `rounds.cpp` for the emulator; return the program."""
    kernels = translate(CSRC / "native", folder / "native", changes)
    includes = [f"-I{path}" for path in (HERE / "shim", HERE, folder, CSRC)]
    # longjmp between stacks is no mistake here.
    options = ["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", *includes]
    sources = [*kernels, HERE / "emulator.cpp", HERE / "rounds.cpp"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    compiling = [
        subprocess.Popen([str(COMPILER), *options, "-c", source, "-o", target])
        for source, target in zip(sources, objects, strict=True)
    ]
    assert [process.wait(timeout=300) for process in compiling] == [0] * len(sources)
    subprocess.run([str(COMPILER), *objects, "-o", folder / "rounds"], check=True, timeout=60)
    return folder / "rounds"


def run_rounds(program: Path, ranks: int, sequences: int) -> subprocess.CompletedProcess[str]:
    command = [program, str(ranks), "0", str(sequences)]
    limit = SEQUENCE_S * sequences
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_rounds(tmp_path_factory.mktemp("emulation"), {})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_sequences_are_the_oracles(rounds: Path, ranks: int) -> None:
    ended = run_rounds(rounds, ranks, NUM_SEQUENCES)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(f"OK: {NUM_SEQUENCES} sequences")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(tmp_path: Path, mistake: str) -> None:
    name, old, new, ranks = MISTAKES[mistake]
    program = compile_rounds(tmp_path / "kernels", {name: (old, new)})
    ended = run_rounds(program, ranks, 4 * NUM_SEQUENCES)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("FAILED: ")
