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
from emulation import network_mistakes, rounds_mistakes, wide_mistakes
from emulation.translate import Change, translate

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
        *network_mistakes.CASES, *wide_mistakes.CASES,
    )
]  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """What is changed, the sequences in which it shows, and what is said then."""

    file: str
    where: str
    instead: str
    kind: str
    ranks: int
    notice: str
    seed: int = 0  # from which on it soon shows


# Of schedules, order and failures.  What is a wrong number in every run the oracle sees anyway.
# fmt: off
MISTAKES = {
    # Who waits for what.
    "a count is not reset": Mistake(
        "native/rows/pairs.cuh", "counts[group[i]] = 0;", "",
        "rows", 2, "."),
    "a count of staging CTAs is not reset": Mistake(
        "native/rows/stage.cuh", "*count = 0;", "",
        "rows", 2, "a wait was in vain|dispatch: "),
    "the work counter is not reset": Mistake(
        "native/device/wait.cuh",
        "ctx.state->arrived = ctx.state->leaving = «ctx.state->next = 0»;", "0",
        "rows", 2, "dispatch: row|combine: "),
    "both dispatches use one half of the window": Mistake(
        "native/rows/dispatch.cu", "dispatches % 2", "0",
        "dispatches", 2, "dispatch: "),
    "both dispatches use the same weights": Mistake(
        "native/rails/phases.cuh", "(parity * layout.num_ranks + source)", "source",
        "dispatches", 2, "dispatch: weight"),
    "a dispatch is over before all ranks have entered it": Mistake(
        "native/rows/dispatch.cu",
        "== 0) {\n        «compare_entries(ctx, rails, Phase::kDispatch, entry, epoch);»",
        "",
        "dispatches", 4, "dispatch: "),
    "entries of two calls lie in one place": Mistake(
        "native/device/wait.cuh", "number % 2 * ctx.control.num_ranks + rank", "rank",
        "dispatches", 2, "."),
    "more phases are taken for seen than are": Mistake(
        "native/rows/progress.cuh", "kWarpSize : «__ffs(absent) - 1»;", "__ffs(absent)",
        "rows", 2, "dispatch: "),
    "a phase is flagged before its rows are written": Mistake(
        "native/rows/ring.cuh", "wait_for_stores();", "",
        "rows", 2, "."),
    "sums are sent before their rank has entered": Mistake(
        "native/rows/combine.cu", "bool has_entered = «!sends»;", "true",
        "rows", 2, "."),
    "sums are flagged before they are written": Mistake(
        "native/rows/send.cuh", "wait_for_older_stores<kSentAhead>();", "",
        "combines", 5, "combine: token"),
    "sums of the combine before are taken": Mistake(
        "native/rows/combine.cu", "now.token / kChunk, «epoch»", "epoch - 1",
        "rows", 2, "combine: "),
    "rows are added up before they are there": Mistake(
        "native/rows/reduce_rows.cuh",
        "wait_for_copies<kStages - 2>();", "wait_for_copies<kStages - 1>();",
        "rows", 2, "combine: token"),
    "a stage is loaded while it is being stored": Mistake(
        "native/rows/ring.cuh", "wait_for_reads_of_stores<1>();", "wait_for_reads_of_stores<2>();",
        "rows", 2, "."),
    "routes are written while the last ones are fetched": Mistake(
        "native/plan/plan.cu", "*static_cast<volatile std::uint64_t*>(&ctx.state->received)", "0",
        "plans", 3, "plan: ", 14),
    "routes are fetched before they are written": Mistake(
        "native/plan/plan_receive.cu", "kRoutesWritten, source),\n" + " " * 30 + "«plans»)", "0",
        "rows", 2, "plan: "),
    "counts of two plans lie in one place": Mistake(
        "native/plan/plan.cu", "(plans % 2 * layout.num_ranks + source)", "source",
        "plans", 3, "."),

    # In which order others see it.
    "a phase's flag is seen before its rows": Mistake(
        "native/rows/stage.cuh", "«__threadfence_system();»  // for what all warps", "",
        "dispatches", 2, "dispatch: "),
    "what a flag stands for is loaded before the flag": Mistake(
        "native/device/wait.cuh", "return «load_acquire(word)» >= goal;", "load_relaxed(word)",
        "plans", 2, "plan: "),
    "rows are loaded before their flag is seen": Mistake(
        "native/rows/progress.cuh", "«fence_system();»\n      __syncwarp();", "",
        "dispatches", 2, "dispatch: "),
    "a chunk's flag is seen before its sums": Mistake(
        "native/rows/pairs.cuh",
        "if (!__any_sync(~0u, num_published < done)) continue;\n    «fence_system();»", "",
        "rows", 2, "combine: "),

    "a grid's barrier is passed without a fence before it": Mistake(
        "native/device/wait.cuh", "«__threadfence();»\n    const unsigned int arrival", "",
        "chunks", 1, "plan: |an address"),
    "a grid's barrier is passed without a fence after it": Mistake(
        "native/device/wait.cuh", "«__threadfence();»\n  }\n  return __syncthreads_and", "",
        "chunks", 1, "plan: |an address"),
    "the last CTA leaves without what the others wrote": Mistake(
        "native/device/wait.cuh", "ctx.state->next = 0;\n    «__threadfence_system();»", "",
        "plans", 2, "plan: "),
    "what one lane has seen is not in what another one shows": Mistake(
        "native/rows/progress.cuh", "«__threadfence_block();»  // lane 0 also", "",
        "rows", 2, "dispatch: "),
    "the last staging CTA does not pass on the others' rows": Mistake(
        "native/rows/stage.cuh", "«fence_system();»  // passes on", "",
        "dispatches", 2, "dispatch: "),
    "who completes a chunk does not pass on the others' sums": Mistake(
        "native/rows/pairs.cuh", "if (completes) fence_system();", "",
        "combines", 3, "combine: "),
    "rows are staged without a fence of bulk copies": Mistake(
        "native/rows/stage.cuh", "fence_for_bulk_copies();", "",
        "dispatches", 2, "dispatch: "),
    "rows are loaded without a fence of bulk copies": Mistake(
        "native/rows/progress.cuh", "fence_for_bulk_copies();", "",
        "dispatches", 2, "dispatch: "),
    "a bulk copy follows a store to shared memory": Mistake(
        "native/rows/dispatch.cu", "if («slot[s] < 0») return;",
        "(ring.pieces[s * shape.piece_bytes] = 0, slot[s] < 0)",
        "dispatches", 2, "a bulk copy uses shared memory"),

    # Counters that wrap.
    "a word of a new window is taken for number 2^31": Mistake(
        "native/device/wait.cuh",
        "return «kIsWritten | number << 32 | value»;", "number << 32 | value", "ll", 2, "ll "),
    "all bits of a number are compared with a word's": Mistake(
        "native/device/wait.cuh", "== «numbered(number, 0) >> 32»;", "(number | UINT64_C(1) << 31)",
        "ll", 1, "a wait was in vain"),
    "a word of 0 is taken for a failure": Mistake(
        "native/device/wait.cuh",
        "return «arrived» ? static", "arrived && (found & 0xffffffffu) != 0", "ll", 2, "ll "),
    "a flag has 32 bits": Mistake(
        "native/rows/progress.cuh", "«load_relaxed(flag(source, unit))» >= epoch",
        "static_cast<std::uint32_t>(load_relaxed(flag(source, unit)))",
        "rows", 2, "a wait was in vain", 3),
    "all bits of an entry's number are compared": Mistake(
        "native/device/wait.cuh", "entry >> 48 == «(number & 0xffffu)»", "number",
        "dispatches", 1, "a wait was in vain"),
    "nobody has entered a new window, which looks like number 2^16": Mistake(
        "native/device/wait.cuh", "return «entry != 0» && entry >> 48", "true",
        "rows", 2, ".", 37),
    "all bits of a plan's number are in a call": Mistake(
        "native/host/call_signature.cpp", "|= «(value & mask(width))» << place_", "value",
        "rows", 1, "a wait was in vain"),

    # A rank that does not come.
    "the deadline is ignored": Mistake(
        "native/device/wait.cuh",
        "if («waited_ns <= static_cast<std::int64_t>(ctx.deadline_ns)») return false;",
        "now_ns() > 0", "failures", 2, "nobody gets any further"),
    "the clock goes back": Mistake(
        "native/device/wait.cuh", "waited_ns = «ns_since(start_)»;",
        "static_cast<std::int64_t>((now_ns() - start_) >> 1)", "rows", 2, "a wait was in vain"),
    "a rank that has not come is said to have": Mistake(
        "native/device/wait.cuh", "return «is_entry_of(entry, number)» ?", "true",
        "failures", 2, "failure: rank . says that rank . came"),
    "the wrong rank is named": Mistake(
        "native/device/wait.cuh", "ctx.mailbox->failed_peer = «peer»;", "ctx.rank",
        "failures", 3, "failure: rank . (names|does not say that) rank"),
    "what a barrier counts is named as the operation": Mistake(
        "native/device/wait.cuh", "ctx.rank, «current_epoch(ctx)»,", "goal",
        "late", 3, "failure: rank . names operation"),
    "a plan's number is named as the operation": Mistake(
        "native/plan/plan.cu", "Phase::kPlan, source, «epoch»,", "plans",
        "failures", 3, "failure: rank . names operation", 1),
    "nobody hears that a rank goes no further": Mistake(
        "native/device/wait.cuh", "«is_refused(ctx, phase, epoch)») return true;", "false",
        "failures", 3, "failure: rank . does not say that rank . refused"),
    "a refusal ends the operation before": Mistake(
        "native/device/wait.cuh", "if («static_cast<std::int64_t>(now - then) < 0») ", "false",
        "rails-failures", 6, "failure: rank . before the call that was refused", 19),
    "ranks in different calls are not noticed": Mistake(
        "native/device/call_barrier.cuh", "if («entry != 0» && entry", "false",
        "failures", 2, "."),
    "ranks that use different plans are not noticed": Mistake(
        "native/device/call_barrier.cuh", "entry != 0 && «entry != entry_of(ctx, number)»",
        "((entry ^ entry_of(ctx, number)) & ~(UINT64_C(0x3fff) << 34)) != 0",
        "calls", 2, "failure: rank . has waited for nobody"),
    "the phase is not in a call": Mistake(
        "native/host/call_signature.cpp", "«static_cast<std::uint64_t>(phase)», kPhaseBits", "2",
        "calls", 2, "failure: rank . has waited for nobody"),
    "rows that did not come are left as they are": Mistake(
        "native/rows/dispatch.cu", "fill_nan(job.rows, job.num_rows * job.row_bytes);", "",
        "failures", 2, "dispatch: rows of rank .* not all NaN"),
    "a plan goes on after a failure": Mistake(
        "native/plan/plan.cu", "«had_failed(ctx)») {\n    finish(ctx, rails, plan,",
        "had_failed(ctx), false",
        "failures", 2, "failure: rank . writes into other ranks' windows"),
    "a dispatch goes on after a failure": Mistake(
        "native/rows/dispatch.cu",
        "«!had_failed(ctx)») {\n    if (blockIdx.x == 0", "had_failed(ctx), true",
        "failures", 2, "failure: rank . writes into other ranks' windows"),
    "a combine goes on after a failure": Mistake(
        "native/rows/combine.cu", "«had_failed(ctx)») {\n    finish<R>(ctx, job, entry, epoch);",
        "had_failed(ctx), false",
        "failures", 2, "failure: rank . writes into other ranks' windows|an address"),
    "a grid's barrier lets through without all CTAs": Mistake(
        "native/device/wait.cuh", "__syncthreads_and(all_here)", "__syncthreads_and(true)",
        "late", 3, ".", 64),
    "a plan has rows after a failure": Mistake(
        "native/plan/plan.cu", "if («has_failed(ctx)») {\n    // No rank", "false",
        "failures", 3, "plan: rows of rank . after a failure"),
    "a CTA that starts after a failure leaves its grid waiting": Mistake(
        "native/plan/plan_receive.cu", "leave(ctx);\n    return;", "return;",
        "late", 3, ".", 53),

    # Low-latency mode: who waits for what.
    "LL: a CTA counts itself before its warps have sent": Mistake(
        "native/low_latency/operation.cuh", "is_bad = «__syncthreads_or(is_bad)»;", "is_bad",
        "ll", 2, "ll "),
    "LL: the first CTA advances the number, not the last": Mistake(
        "native/low_latency/dispatch.cu",
        "ll.state->domains_of[thread] = found.domains;",
        "ll.state->domains_of[thread] = found.domains;"
        "if (thread == 0) ll.state->dispatches = now.number;", "ll", 2, "."),
    "LL: a combine waits only for ranks with rows of its tokens": Mistake(
        "native/low_latency/combine.cu", "if («thread < locals && !has_failed») {",
        "thread < locals && !has_failed && rows.count(thread, job.num_tokens) > 0",
        "ll", 3, "."),
    "LL: a dispatch does not wait for one of the ranks": Mistake(
        "native/low_latency/dispatch.cu",
        "if («R::kEnabled && is_local(ctx, rank) != for_local») continue;",
        "rank == (ctx.rank + 1) % window.num_ranks",
        "ll", 2, "ll "),
    "LL: sums are added before they are there": Mistake(
        "native/low_latency/combine.cu",
        "«wait_for_numbered<load_acquire>(ctx, Phase::kLowLatencyCombine, rank, now.number,\n"
        + " " * 49 + "sent_word(ll, ctx.rank, Turn::kCombine, rank),\n"
        + " " * 49 + "now.number) < 0»;",
        "false",
        "ll", 2, "ll combine: "),
    "LL: the word of the operation before is taken": Mistake(
        "native/device/wait.cuh", "return «has_number(found, number)»;",
        "(found >> 32) + 1 >= numbered(number, 0) >> 32",
        "ll", 2, "ll "),

    # In which order others see it.
    "LL: a CTA counts itself without a fence": Mistake(
        "native/low_latency/operation.cuh", "__threadfence();", "",
        "ll", 2, "ll "),
    "LL: a dispatch's word is seen before its rows": Mistake(
        "native/low_latency/dispatch.cu", "«fence_system();»  // passes on", "",
        "ll", 2, "ll dispatch: "),
    "LL: a combine's word is seen before its sums": Mistake(
        "native/low_latency/combine.cu", "«fence_system();»  // passes on", "",
        "ll", 2, "ll combine: "),
    "LL: sums are loaded before their word": Mistake(
        "native/device/wait.cuh", "found = «kLoad(word)»;", "load_relaxed(word)",
        "ll", 2, "ll "),

    # A rank that does not come.
    "LL: rows that did not come are counted": Mistake(
        "native/low_latency/dispatch.cu", "has_failed ? 0 : counts[rank]", "counts[rank]",
        "ll-failures", 2, "ll dispatch: counts"),
    "LL: a dispatch goes on after a failure": Mistake(
        "native/low_latency/dispatch.cu",
        "has_failed || send_rows<R>(ctx, ll, job, rows, domains)",
        "send_rows<R>(ctx, ll, job, rows, domains)",
        "ll-failures", 2, "."),
    "LL: a word is given after a failure": Mistake(
        "native/low_latency/combine.cu", "«sent < kSentFailed») {", "true",
        "ll-failures", 2, "."),
    "LL: an operation out of turn is made": Mistake(
        "native/low_latency/operation.cuh",
        "if («sends && !is_in_turn && !now.has_failed»)", "false",
        "ll-failures", 2, "."),
}
# fmt: on
for more in (network_mistakes, rounds_mistakes, wide_mistakes):
    MISTAKES |= {name: Mistake(*each) for name, each in more.MISTAKES.items()}


@pytest.fixture(scope="module")
def rounds() -> Path:
    """The folder of `narrow` and `wide`, each with the kernels for domains of so many ranks.

    They are compiled with all mistakes: one is chosen when they run.
    """
    compiler = str(COMPILER)
    changes = [Change(each.file, each.where, each.instead) for each in MISTAKES.values()]
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
