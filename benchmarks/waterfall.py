"""Draw one training step: kinds of kernels, waits for other ranks by their cause, idle time.

The traces are those of `python -m benchmarks --trace`, one of each rank, in a folder.

Kernels that meet other ranks cannot end before all have begun them.  Ranks meet in the same order,
so that of the k-th call of such a kernel, what lies before the last rank's begin is waiting.  In a
dispatch or combine its cause is the work that the last rank had more since the two met before, and
otherwise that its host came late.  The clocks of the GPUs of one host agree to microseconds.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plot import COLORS, IDLE
from benchmarks.profiles import IN_OPTIMIZER, MARK, Interval, kernel_kind, time_shares
from benchmarks.result import KINDS
from megatron_ncclep.cli import Parser
from megatron_ncclep.error_reporting import run_reporting
from megatron_ncclep.errors import InputError

NAME = "benchmarks.waterfall"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
MEETING = ("dispatch", "combine", "plan", "collectives")  # kinds of kernels that meet other ranks
LOAD, HOST, COLLECTIVES = "wait: uneven load", "wait: late host", "wait in collectives"
WAITS = {LOAD: "#7A0403", HOST: "#C7302F", COLLECTIVES: "#F3A6A0"}


@dataclass(frozen=True)
class Step:
    """One step on one rank: what its device ran, in order, in microseconds from the first mark."""

    begin: float  # microseconds of the host's clock
    length: float
    kernels: list[Interval]

    def busy(self, until: float) -> float:
        """The time before `until` in which the device ran anything."""
        total = last = 0.0
        for kernel in self.kernels[: bisect.bisect(self.kernels, until, key=lambda k: k.start)]:
            total += max(0.0, min(kernel.end, until) - max(kernel.start, last))
            last = max(last, kernel.end)
        return total


def read(path: Path) -> Step:
    """Read a trace.

    Raises:
        InputError: it is no trace of `trace_step`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        base, phases = content["baseTimeNanoseconds"] / 1e3, content[IN_OPTIMIZER]
        events = [e for e in content["traceEvents"] if e.get("cat") in ON_DEVICE]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wrong = f"{path}: {type(error).__name__}: {error}"
        raise InputError(f"{wrong}: give a folder that --trace has written") from error
    marks = sorted(e["ts"] for e in events if MARK in e["name"])
    if len(marks) != len(phases) + 1:
        raise InputError(f"{path}: {len(marks)} marks around {len(phases)} phases: trace it again")
    begin, kernels = marks[0], []
    for event in sorted(events, key=lambda e: float(e["ts"])):
        if begin <= event["ts"] < marks[-1] and MARK not in event["name"]:
            phase = phases[bisect.bisect(marks, event["ts"]) - 1]
            start = event["ts"] - begin
            kind = kernel_kind(event["name"], phase)
            kernels.append(Interval(event["name"], start, start + event["dur"], kind))
    return Step(base + begin, marks[-1] - begin, kernels)


def with_waits(steps: Sequence[Step]) -> list[list[Interval]]:
    """The ranks' kernels, with the part in which a kernel waits for another rank by its cause."""
    calls: dict[tuple[str, int], dict[int, Interval]] = defaultdict(dict)
    for rank, step in enumerate(steps):
        seen: dict[str, int] = defaultdict(int)
        for kernel in step.kernels:
            if kernel.kind in MEETING:
                calls[kernel.name, seen[kernel.name]][rank] = kernel
                seen[kernel.name] += 1
    found: list[dict[int, list[Interval]]] = [{} for _ in steps]
    met = [0.0] * len(steps)  # busy time of each rank when all met last
    both = (each for each in calls.values() if len(each) == len(steps))
    for each in sorted(both, key=lambda each: each[0].start):
        begins = {rank: steps[rank].begin + kernel.start for rank, kernel in each.items()}
        last = max(begins, key=begins.__getitem__)
        worked = {rank: steps[rank].busy(each[rank].start) - met[rank] for rank in each}
        for rank, kernel in each.items():
            wait = min(kernel.end - kernel.start, begins[last] - begins[rank])
            more = min(wait, max(0.0, worked[last] - worked[rank]))
            causes = (LOAD, HOST) if kernel.kind != "collectives" else (COLLECTIVES,) * 2
            ends = (kernel.start + more, kernel.start + wait, kernel.end)
            found[rank][id(kernel)] = [
                replace(kernel, start=start, end=end, kind=kind)
                for (start, end), kind in zip(
                    itertools.pairwise((kernel.start, *ends)), (*causes, kernel.kind), strict=True
                )
                if end > start
            ]
            met[rank] = steps[rank].busy(kernel.end)
    return [
        [part for kernel in step.kernels for part in found[rank].get(id(kernel), [kernel])]
        for rank, step in enumerate(steps)
    ]


def totals(steps: Sequence[Step]) -> dict[str, float]:
    """Microseconds of a step by kind of kernel, cause of waiting and idle; means over the ranks."""
    sums = dict.fromkeys((*KINDS, *WAITS, IDLE), 0.0)
    for step, kernels in zip(steps, with_waits(steps), strict=True):
        shares = time_shares(kernels)
        shares[IDLE] = max(0.0, step.length - sum(shares.values()))
        for kind, share in shares.items():
            sums[kind] += share / len(steps)
    return {kind: us for kind, us in sums.items() if us}


def draw(steps: Sequence[Step], title: str, path: Path) -> dict[str, float]:
    """Draw `totals`, one below the other, and the ranks' timelines; return the former."""
    from matplotlib.figure import Figure

    found, colors = totals(steps), {**COLORS, **WAITS}
    figure = Figure(figsize=(11, 2 + 0.3 * len(found) + 0.6 * len(steps)), layout="constrained")
    fall, line = figure.subplots(
        2, 1, sharex=True, height_ratios=[len(found), 1 + 1.5 * len(steps)]
    )
    left, whole = 0.0, sum(found.values())
    for place, (kind, us) in enumerate(found.items()):
        fall.barh(place, us / 1e3, left=left / 1e3, color=colors[kind], edgecolor="#555555")
        fall.text((left + us) / 1e3, place, f"  {us / 1e3:.1f} ms, {us / whole:.0%}", va="center")
        left += us
    fall.set_yticks(range(len(found)), found)
    fall.invert_yaxis()
    fall.set_xlim(0, 1.15 * whole / 1e3)
    fall.set_title(f"{title}: one step of {whole / 1e3:.1f} ms, mean over {len(steps)} ranks")
    first = min(step.begin for step in steps)
    for rank, (step, kernels) in enumerate(zip(steps, with_waits(steps), strict=True)):
        of_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for k in kernels:
            of_kind[k.kind].append(((step.begin - first + k.start) / 1e3, (k.end - k.start) / 1e3))
        for kind, parts in of_kind.items():
            line.broken_barh(parts, (rank - 0.4, 0.8), color=colors[kind], linewidth=0)
    line.set_yticks(range(len(steps)), [f"rank {rank}" for rank in range(len(steps))])
    line.invert_yaxis()
    line.set_xlabel("milliseconds; idle is white")
    figure.savefig(path, dpi=150)
    return found


def draw_folder(folder: Path) -> Path:
    """Draw the traces of a folder: its waterfall.png, and the numbers as waterfall.json.

    Raises:
        InputError: it has none, or what it has is no trace.
    """
    files = sorted(folder.glob("rank*.json"), key=lambda p: int(p.stem.removeprefix("rank")))
    if not files:
        raise InputError(f"{folder}: no rank0.json: give a folder that --trace has written")
    drawn = folder / "waterfall.png"
    found = draw([read(path) for path in files], folder.name, drawn)
    drawn.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return drawn


def run(args: argparse.Namespace) -> int:
    """Draw each folder, and return the exit status."""
    for folder in args.folder:
        print(f"drawn: {draw_folder(Path(folder))}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's) and return its exit status."""
    parser = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="+", help="with rank0.json, rank1.json, ...")
    args: Any = parser.parse_args(argv)
    return run_reporting(NAME, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
