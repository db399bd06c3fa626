"""The native engine's kernels on an emulated GPU: what waits for what, and which bits come out.

Random sequences of plans, dispatches and combines run on every rank at its own pace, under random
schedules (`emulation/`), and are held against an oracle; in some of them a rank stays away, and in
every second one all counters wrap.  Then the kernels are broken on purpose, in ways that a GPU
would forgive most of the time, and that must be noticed.  At last the emulator measures the
kernels' paths on a rank of many.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from build_cache import cached, run_all, version_of
from emulation import mistakes, rails_mistakes
from emulation.translate import translate

HERE = Path(__file__).parent / "emulation"
CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")
PROGRAMS = {"narrow": 1, "wide": 3}  # and NCCLEP_RANK_GROUPS (csrc/native/state.h)
SEQUENCE_S = 150  # of CPU time at most, which does not grow when the machine is busy
MOST_SEQUENCES = 128  # until a mistake is noticed; two show in only one of about a hundred

Ended = Future[subprocess.CompletedProcess[str]]

pytestmark = [
    pytest.mark.any_python("it runs C++"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (c++ or g++) on PATH"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are for Linux"),
]


@dataclass(frozen=True)
class Case:
    """Sequences of a kind (emulation/sequence.h), and which of MISTAKES is made; -1: none."""

    kind: str
    ranks: int
    sequences: int
    mistake: int = -1
    seed: int = 0  # of the first

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}"


UNBROKEN = [
    Case(*case) for case in (
        ("rows", 1, 4), ("rows", 2, 6), ("rows", 3, 4), ("rows", 5, 1), ("dispatches", 2, 4),
        ("combines", 3, 1), ("chunks", 1, 4), ("chunks", 3, 1), ("experts", 2, 6),
        ("experts", 5, 2), ("plans", 3, 6), ("calls", 2, 8), ("calls", 3, 6), ("failures", 1, 6),
        ("failures", 2, 10), ("failures", 4, 5), ("late", 3, 6), ("ll", 1, 6), ("ll", 2, 12),
        ("ll", 3, 8), ("ll", 5, 3), ("ll-failures", 2, 10), ("ll-failures", 4, 8),
        # Over a network.
        ("probes", 2, 12), ("probes", 4, 12), ("probes", 6, 12), ("rails-plans", 2, 6),
        ("rails-plans", 4, 4), ("rails-plans", 6, 3), ("rails-many", 33, 1),
        ("rails-failures", 2, 6), ("rails-rows", 2, 4), ("rails-rows", 4, 3), ("rails-rows", 6, 1),
        ("rails-dispatches", 4, 2), ("rails-dispatches", 6, 1), ("rails-combines", 4, 2),
        ("rails-combines", 6, 1), ("rails-failures", 4, 5), ("rails-calls", 4, 4),
        ("rails-late", 4, 3), ("rails-ll", 2, 10), ("rails-ll", 4, 8), ("rails-ll", 6, 4),
        ("rails-ll-many", 36, 1), ("rails-ll-failures", 2, 8), ("rails-ll-failures", 4, 6),
        # Queues with few places, and a direction in which nothing gets any further.
        ("short-probes", 4, 6), ("short-rails-plans", 4, 3), ("short-rails-rows", 4, 2),
        ("short-rails-failures", 4, 4), ("short-rails-ll", 4, 4), ("short-rails-ll-failures", 4, 4),
        ("short-rails-cut", 2, 8), ("short-rails-cut", 4, 5), ("rails-cut", 4, 4),
        ("short-rails-ll-cut", 2, 8), ("short-rails-ll-cut", 4, 8),
        # NVLink domains of more than 32 ranks: the last group of 32 has one rank, is full, or has
        # as many as there may be; over the network it has one in each domain.  15: a seed of which
        # rows are dropped.
        ("wide-many", 33, 1), ("wide-many", 64, 1), ("wide-many", 72, 1),
        ("wide-rails-many", 66, 1, -1, 15), ("wide-failures", 36, 2),
    )
]  # fmt: skip


MISTAKES = mistakes.MISTAKES | rails_mistakes.MISTAKES


@pytest.fixture(scope="module")
def rounds() -> Path:
    """The folder of `narrow` and `wide`, each with the kernels for domains of so many ranks.

    They are compiled with all mistakes: one is chosen when they run.
    """
    compiler = str(COMPILER)
    changes = list(MISTAKES.values())
    sources = sorted(HERE.rglob("*.cpp"))
    inputs = [version_of(compiler), changes, Path(__file__), *sorted(HERE.rglob("*.[hpc]*"))]

    def make(folder: Path) -> None:
        kernels = translate(CSRC, folder, changes)
        includes = [f"-I{path}" for path in (HERE / "machine", HERE, folder, CSRC)]
        options = ["-std=c++17", "-O1", "-w", "-include", "emulator.h"]
        options.append("-DNCCLEP_NCCL_HEADERS")
        # visibility.h; its functions are called instead of the sanitizer's own.
        hooked = [*kernels, HERE / "paths.cpp"]
        compiles, objects = [], {program: [] for program in PROGRAMS}
        for source in [*kernels, *sources]:
            is_machine = source.parent.name == "machine"  # which is the same in all programs
            hook = "-fsanitize=thread" if source in hooked else "-O3" if is_machine else "-O1"
            for program, groups in {"": 1}.items() if is_machine else PROGRAMS.items():
                made = folder / f"{program}_{source.parent.name}_{source.stem}.o"
                more = [f"-DNCCLEP_RANK_GROUPS={groups}", hook, "-c", source, "-o", made]
                compiles.append([compiler, *options, *includes, *more])
                for one in [program] if program else PROGRAMS:
                    objects[one].append(made)
        links = [[compiler, *objects[one], "-o", folder / one] for one in PROGRAMS]
        run_all(compiles)
        run_all(links)

    return cached("emulation", [*inputs, *sorted(CSRC.rglob("*.[hc]*"))], make)


def run_rounds(folder: Path, case: Case) -> subprocess.CompletedProcess[str]:
    numbers = (case.ranks, case.seed, case.sequences, case.mistake)
    program = folder / ("wide" if case.kind.startswith("wide-") else "narrow")
    limited = ["sh", "-c", f'ulimit -t {SEQUENCE_S * case.sequences} && exec "$@"', "sh"]
    command = [*limited, str(program), case.kind, *map(str, numbers)]
    # Its own: it could not start ("Bad address") while a test changes that of this process.
    environment = dict(os.environ)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def ended(rounds: Path, request: pytest.FixtureRequest) -> Iterator[dict[Case, Ended]]:
    """What becomes of the cases of all tests that were selected: they run on all cores."""
    items = (item for item in request.session.items if item.path == request.path)
    mine = (item for item in items if hasattr(item, "callspec"))
    pool = ThreadPoolExecutor(os.cpu_count())
    cases: list[Any] = [i.callspec.params["case"] for i in mine if isinstance(i, pytest.Function)]
    yield {case: pool.submit(run_rounds, rounds, case) for case in cases}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", UNBROKEN, ids=str)
def test_sequences_are_the_oracles(ended: dict[Case, Ended], case: Case) -> None:
    run = ended[case].result()
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith(f"OK: {case.sequences} sequences")


@pytest.mark.parametrize(
    ("case", "notice"),
    [
        (Case(mistake.kind, mistake.ranks, MOST_SEQUENCES, number, mistake.seed), mistake.notice)
        for number, mistake in enumerate(MISTAKES.values())
    ],
    ids=MISTAKES,
)
def test_mistakes_are_noticed(ended: dict[Case, Ended], case: Case, notice: str) -> None:
    run = ended[case].result()
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.match(f"FAILED: ({notice})", run.stdout.splitlines()[-1])


def paths_of(folder: Path, ranks: int, domains: int) -> dict[str, tuple[int, int]]:
    """By kernel, the steps and the fences of the longest thread of a rank (emulation/paths.cpp)."""
    run = run_rounds(folder, Case("paths", ranks, domains))
    assert run.returncode == 0, run.stdout + run.stderr
    lines = re.findall(r"^(.+): (\d+) steps, (\d+) fences$", run.stdout, re.MULTILINE)
    return {kernel: (int(steps), int(fences)) for kernel, steps, fences in lines}


def test_ranks_and_domains_are_not_served_one_after_the_other(rounds: Path) -> None:
    """They were, where nothing ran with so many: low-latency mode took a barrier and a fence for
    each rail peer and walked over all ranks for each row, the watching warp took a fence for each
    rank, and the plan added up all ranks with a thread an expert.
    """
    few, more, most = (paths_of(rounds, 8 * domains, domains) for domains in (2, 8, 64))
    assert len(few) == 5
    for kernel, (steps, fences) in more.items():
        assert steps <= 2 * few[kernel][0], kernel
        assert fences <= few[kernel][1], kernel
        # What is left has a thread for each rank, or a lane: of those there are few here.
        assert most[kernel][0] - steps < 4 * 8 * (64 - 8), kernel
        assert most[kernel][1] - fences <= 2 * 8 * 64 / 32, kernel


def test_rows_return_to_the_ranks_of_a_domain_without_a_walk(rounds: Path) -> None:
    """Every row of a low-latency combine walked over the ranks before its own."""
    few, many = (paths_of(rounds, ranks, 1)["low-latency combine"] for ranks in (8, 32))
    assert many[0] - few[0] <= 4 * (32 - 8)
