"""Run small rounds of an engine under compute-sanitizer: random ones, and of low-latency mode.

python tests/gpu/sanitize.py TOOL ENGINE [--low-latency]   all rounds, or those of low-latency mode

Two ranks, on two GPUs or on one.  TOOL: memcheck, racecheck, initcheck or synccheck

Each process has a compute-sanitizer of its own, which looks at our kernels only.  Fails when one of
them reports an error, when a rank fails, and when the results are wrong.  What racecheck reports as
warnings are accesses of one warp that __syncwarp orders, of which the tool knows nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1] / folder) for folder in (".", "contract")]
from draws import Sizes, drawn, rounds
from processes import Ended, join, run_ranks
from random_round import round_on_rank
from test_low_latency import LowLatencyCase, assert_round, rounds_on_rank

from megatron_ncclep.engines import ENGINES
from megatron_ncclep.ranks.pool import RankContext

NUM_RANKS, ITERATIONS = 2, 4
SEEDS = (0, 4)
LOW_LATENCY = "low-latency"  # a round of it, beside those of seeds
SIZES = Sizes(tokens=300, experts=16, hidden=(128, 512), elements=2**18)
# Kernels under a tool are a hundred times slower.
TIMEOUT_S, JOB_S = 120.0, 240.0
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
    round_of_all = drawn(rounds(ENGINES[engine_name].caps, SIZES, [NUM_RANKS], ITERATIONS), seed)
    difference, dropped = round_on_rank(ctx, engine_name, round_of_all, SIZES, TIMEOUT_S)
    print(f"rank {ctx.rank}: {difference or RIGHT}; {dropped} dropped", flush=True)
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
    print(f"rank {ctx.rank}: {difference or RIGHT}; low-latency mode", flush=True)
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


def problem(ended: Ended) -> str | None:
    """Say what is wrong with a process's end, if anything is: silence of the tool is."""
    summaries = SUMMARY.findall(ended.output)
    if not summaries:
        return "the tool gave no summary"
    found = [summary for summary in summaries if not HARMLESS.match(summary)]
    if found:
        return "; ".join(found)
    # The tool's exit code, which a mere warning makes FOUND, hides that of the rank.
    if RIGHT in ended.output and ended.exit_code in (0, FOUND):
        return None
    return f"exit code {ended.exit_code}"


def command_of(tool: str) -> list[str]:
    """What starts a Python under a tool."""
    sanitizer = find_sanitizer()
    assert sanitizer, "there is no compute-sanitizer on PATH or under CUDA_HOME"
    command = [sanitizer, "--tool", tool, "--target-processes", "all"]
    command += ["--kernel-name", "kns=ncclep", "--report-api-errors", "no"]
    return [*command, "--error-exitcode", str(FOUND), sys.executable, __file__]


def report(what: str, everyone: list[Ended]) -> int:
    """Print what each process said; return how many have a problem."""
    failures = 0
    for number, ended in enumerate(everyone):
        print(f"--- {what}, process {number} ---\n{ended.output}")
        if wrong := problem(ended):
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


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(*sys.argv[2:4])
    else:
        tool, engine_name, *flags = sys.argv[1:]
        unknown = set(flags) - {f"--{LOW_LATENCY}"}
        assert not unknown, f"unknown: {unknown}"
        sys.exit(main(tool, engine_name, rounds_of(engine_name, flags)))
