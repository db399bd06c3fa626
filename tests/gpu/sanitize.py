"""Run a small random round of an engine on two GPUs under compute-sanitizer.

python tests/gpu/sanitize.py TOOL ENGINE      TOOL: memcheck, racecheck, initcheck or synccheck
python tests/gpu/sanitize.py --find           says by its exit status whether there is one

Each rank has a compute-sanitizer of its own, which looks at our kernels only.  Fails when one of
them reports an error, when a rank fails, and when the results are wrong.  What racecheck reports as
warnings are accesses of one warp that __syncwarp orders, of which the tool knows nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from random_round import Sizes, round_on_rank

from megatron_ncclep.testing.processes import Ended, join, run_ranks

NUM_RANKS, ITERATIONS = 2, 4
SEEDS = (0, 4)  # a rank without tokens; static mode that drops picks
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


def rank(engine_name: str, seed: int) -> None:
    """What runs under a tool: one rank of a round."""
    ctx = join("nccl")
    difference, features = round_on_rank(ctx, engine_name, seed, ITERATIONS, SIZES, TIMEOUT_S)
    print(f"rank {ctx.rank}: {difference or RIGHT}; {dict(features)}")
    sys.exit(1 if difference else 0)


def problem(ended: Ended) -> str | None:
    """Say what is wrong with a rank's end, if anything is: silence of the tool is."""
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


def main(tool: str, engine_name: str) -> int:
    sanitizer = find_sanitizer()
    assert sanitizer, "there is no compute-sanitizer on PATH or under CUDA_HOME"
    command = [sanitizer, "--tool", tool, "--target-processes", "all"]
    command += ["--kernel-name", "kns=ncclep", "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FOUND)]
    failures = 0
    for seed in SEEDS:
        python = [sys.executable, __file__, "--rank", engine_name, str(seed)]
        # Every tensor is an allocation of its own, so that what lies behind it is out of bounds.
        everyone = run_ranks(
            [*command, *python], NUM_RANKS, JOB_S, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
        )
        for number, ended in enumerate(everyone):
            print(f"--- seed {seed}, rank {number} ---\n{ended.output}")
            if what := problem(ended):
                failures += 1
                print(f"seed {seed}, rank {number}: {what}")
    print(f"{tool}, {engine_name}, {NUM_RANKS} ranks: {failures or 'no'} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1] == "--find":
        sys.exit(0 if find_sanitizer() else 1)
    elif sys.argv[1] == "--rank":
        rank(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(*sys.argv[1:]))
