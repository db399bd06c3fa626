"""Run small rounds of an engine under compute-sanitizer: random ones, and of low-latency mode.

python tests/gpu/sanitize.py TOOL ENGINE            on two GPUs
python tests/gpu/sanitize.py TOOL native --virtual  2 and 4 virtual ranks on one GPU (tests/virtual)
python tests/gpu/sanitize.py TOOL native [--virtual] --low-latency   those rounds only
python tests/gpu/sanitize.py --find                 says by its exit status whether there is one

TOOL: memcheck, racecheck, initcheck or synccheck

Each process has a compute-sanitizer of its own, which looks at our kernels only.  Fails when one of
them reports an error, when a rank fails, and when the results are wrong.  What racecheck reports as
warnings are accesses of one warp that __syncwarp orders, of which the tool knows nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path += [str(Path(__file__).parents[1] / folder) for folder in (".", "contract", "virtual")]
from processes import Ended, join, run_ranks
from random_round import Sizes, round_on_rank
from test_low_latency import LowLatencyCase, assert_round, rounds_on_rank

from megatron_ncclep.engines import ENGINES
from megatron_ncclep.ranks.pool import RankContext

NUM_RANKS, ITERATIONS = 2, 4
VIRTUAL_RANKS = (2, 4)
SEEDS = (0, 4)  # a rank without tokens; static mode that drops assignments
LOW_LATENCY = "low-latency"  # a round of it, beside those of seeds
SIZES = Sizes(tokens=300, experts=16, hidden=(128, 512), elements=2**18)
# Kernels under a tool are a hundred times slower.
TIMEOUT_S, JOB_S = 120.0, 240.0
# One process for all rounds, in which the tool sees all of CUDA's code before the first kernel.
VIRTUAL_JOB_S = 540.0
RIGHT = "as the oracle says"
FOUND = 86  # the exit code of a tool that found something
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
HARMLESS = re.compile(r"0 |.*\(0 errors, \d+ warnings\)")


def find_sanitizer() -> str | None:
    """The program, on PATH or of the toolkit that CUDA_HOME names."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which(toolkit / "bin" / "compute-sanitizer")


def do_round(ctx: RankContext, engine_name: str, seed: int) -> bool:
    """One rank's part of a round; says what came of it."""
    difference, features = round_on_rank(ctx, engine_name, seed, ITERATIONS, SIZES, TIMEOUT_S)
    # In one piece: other ranks may be threads of this process.
    sys.stdout.write(f"rank {ctx.rank}: {difference or RIGHT}; {dict(features)}\n")
    sys.stdout.flush()
    return not difference


def do_low_latency(ctx: RankContext, engine_name: str) -> bool:
    """One rank's part of rounds of low-latency mode; says what came of them."""
    difference = ""
    for case in (
        LowLatencyCase("bf16", ctx.num_ranks, 4, 9, 3),
        LowLatencyCase(
            "fp8", ctx.num_ranks, 2, 33, 2, 256, payload=torch.float8_e4m3fn, num_scales=4
        ),
    ):
        # Under a tool what a host does may wait for all kernels, also for one that waits for this
        # rank: so hosts do nothing between meeting and launching.
        results = rounds_on_rank(ctx, engine_name, case, TIMEOUT_S, meets=True)
        try:
            for number, result in enumerate(results):
                assert_round(case, number, ctx.rank, result)
        except AssertionError as error:
            difference = difference or f"{case}: {error}"
    sys.stdout.write(f"rank {ctx.rank}: {difference or RIGHT}; low-latency mode\n")
    sys.stdout.flush()
    return not difference


def rounds_of(engine_name: str, flags: Sequence[str] = ()) -> list[str]:
    """Seeds of random rounds, and low-latency mode where the engine has it, or that alone."""
    if f"--{LOW_LATENCY}" in flags:
        return [LOW_LATENCY]
    has_mode = ENGINES[engine_name].caps.low_latency_tokens > 0
    return [*map(str, SEEDS), *[LOW_LATENCY] * has_mode]


def do(ctx: RankContext, engine_name: str, which: str) -> bool:
    """One rank's part of one of `rounds_of`."""
    if which == LOW_LATENCY:
        return do_low_latency(ctx, engine_name)
    return do_round(ctx, engine_name, int(which))


def rank(engine_name: str, which: str) -> None:
    """What runs under a tool: one rank of a round."""
    sys.exit(0 if do(join("nccl"), engine_name, which) else 1)


def do_virtual_rounds(ctx: RankContext, engine_name: str, rounds: list[str]) -> bool:
    """All rounds of one virtual rank."""
    all_right = True
    for num_ranks in VIRTUAL_RANKS:
        group = dist.new_group(list(range(num_ranks)))
        if ctx.rank < num_ranks:
            few = RankContext(ctx.rank, num_ranks, group, ctx.device)
            for which in rounds:
                all_right &= do(few, engine_name, which)
        dist.barrier(ctx.group)
    return all_right


def virtual(tool: str, engine_name: str, library: str, *rounds: str) -> None:
    """What runs under a tool: a process whose threads are the ranks of all rounds."""
    import virtual_ranks

    if tool == "memcheck":
        # Every tensor is an allocation of its own, so that what lies behind it is out of bounds.
        torch.cuda.memory.change_current_allocator(
            torch.cuda.memory.CUDAPluggableAllocator(library, "virtual_malloc", "virtual_free")
        )
    host = virtual_ranks.Host(max(VIRTUAL_RANKS), "cuda", Path(library))
    results = host.run(do_virtual_rounds, engine_name, list(rounds))
    sys.stdout.flush()
    # Threads that hang must not keep the process; the tool has written all it found by then.
    sys.exit(0 if all(result is True for result in results) else 1)


def problem(ended: Ended, num_right: int = 1) -> str | None:
    """Say what is wrong with a process's end, if anything is: silence of the tool is.

    `num_right`: how many ranks and rounds have to say that they were right.
    """
    summaries = SUMMARY.findall(ended.output)
    if not summaries:
        return "the tool gave no summary"
    found = [summary for summary in summaries if not HARMLESS.match(summary)]
    if found:
        return "; ".join(found)
    # The tool's exit code, which a mere warning makes FOUND, hides that of the rank.
    if ended.output.count(RIGHT) == num_right and ended.exit_code in (0, FOUND):
        return None
    return f"exit code {ended.exit_code}"


def command_of(tool: str) -> list[str]:
    """What starts a Python under a tool."""
    sanitizer = find_sanitizer()
    assert sanitizer, "there is no compute-sanitizer on PATH or under CUDA_HOME"
    command = [sanitizer, "--tool", tool, "--target-processes", "all"]
    command += ["--kernel-name", "kns=ncclep", "--report-api-errors", "no"]
    return [*command, "--error-exitcode", str(FOUND), sys.executable, __file__]


def report(what: str, everyone: list[Ended], num_right: int = 1) -> int:
    """Print what each process said; return how many have a problem."""
    failures = 0
    for number, ended in enumerate(everyone):
        print(f"--- {what}, process {number} ---\n{ended.output}")
        if wrong := problem(ended, num_right):
            failures += 1
            print(f"{what}, process {number}: {wrong}")
    return failures


def main(tool: str, engine_name: str, rounds: list[str]) -> int:
    failures = 0
    for which in rounds:
        command = [*command_of(tool), "--rank", engine_name, which]
        # As above: every tensor is an allocation of its own.
        everyone = run_ranks(command, NUM_RANKS, JOB_S, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        failures += report(f"round {which}", everyone)
    print(f"{tool}, {engine_name}, {NUM_RANKS} ranks: {failures or 'no'} failures")
    return 1 if failures else 0


def main_virtual(tool: str, engine_name: str, rounds: list[str]) -> int:
    from virtual_pool import compile_stand_in
    from virtual_ranks import ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libvirtual_nccl.so"
        compile_stand_in(library)
        command = [*command_of(tool), "--process", tool, engine_name, str(library), *rounds]
        everyone = run_ranks(command, 1, VIRTUAL_JOB_S, **ENVIRONMENT)
    ranks = " and ".join(map(str, VIRTUAL_RANKS))
    failures = report(f"{ranks} virtual ranks", everyone, len(rounds) * sum(VIRTUAL_RANKS))
    print(f"{tool}, {engine_name}, {ranks} virtual ranks: {failures or 'no'} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1] == "--find":
        sys.exit(0 if find_sanitizer() else 1)
    elif sys.argv[1] == "--rank":
        rank(*sys.argv[2:4])
    elif sys.argv[1] == "--process":
        virtual(*sys.argv[2:])
    else:
        tool, engine_name, *flags = sys.argv[1:]
        unknown = set(flags) - {"--virtual", f"--{LOW_LATENCY}"}
        assert not unknown, f"unknown: {unknown}"
        run = main_virtual if "--virtual" in flags else main
        sys.exit(run(tool, engine_name, rounds_of(engine_name, flags)))
