"""Draw a bench.json.

It has a bar for each subject, stacked by pass, and the limit: the time that the rows take at
the ceiling of the links, measured in the same run.  Whole layers and experts alone have separate
panels without the limit.  A training step's bar is the device's time by kind of kernel and idle
time; without a profile, or with several ranks, the step's.  Low-latency mode has lines over tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks import result as results
from benchmarks import table
from benchmarks.result import KINDS, LISTS
from megatron_ncclep.benchmark import BOTH, PAIR, STEPS, WHOLE
from megatron_ncclep.benchmark.table import same_sizes, sizes
from megatron_ncclep.cli import Parser
from megatron_ncclep.error_reporting import run_reporting
from megatron_ncclep.errors import InputError

NAME = "benchmarks.plot"
IDLE, STEP = "idle", "step"
# Okabe and Ito's colours, which people with any colour vision can tell apart, and greys; neighbours
# in a bar differ in lightness too.
COLORS = {
    "plan": "#999999", "dispatch": "#0072B2", "combine": "#E69F00", "bwd_dispatch": "#56B4E9",
    "bwd_combine": "#F0E442", "forward": "#009E73", "backward": "#CC79A7", BOTH: "#D55E00",
    "limit": "#000000", "attention": "#F0E442", "GEMM": "#56B4E9", "permute": "#CC79A7",
    "optimizer": "#009E73", "collectives": "#D55E00", "rest": "#DDDDDD", IDLE: "#FFFFFF",
    STEP: "#56B4E9", "pair": "#009E73",
}  # fmt: skip
# Colours of the legend; panels without passes begin with the kinds of kernels.
PASSES = (*STEPS, *WHOLE, BOTH, "limit")
PIECES = (*KINDS, IDLE, STEP)
# Kinds of subjects with a separate panel, and the text that its title adds.
PANELS = {"layer": ", whole MoELayer", "experts": ", experts alone"}
STYLES = ("-", "--", ":", "-.")  # of subjects of low-latency mode
LABELLED_SHARE = 0.06  # narrower pieces of a training step have no space for their number
LEGEND_COLUMNS = 6
BARS_OF_LINES = 8  # a panel of lines is as high as this many bars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks.plot`."""
    add = parser.add_argument
    add("result", metavar="BENCH_JSON", help="bench.json of a run")
    add("-o", "--out", help="image file (default: a PNG file next to the result)")
    add(
        "--subjects", type=lambda text: text.split(","), action="extend",
        help="draw these only, separated by commas, such as native,nccl_ep",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Draw, and return the exit status.

    Raises:
        InputError: no such result, nothing in it to draw, or no matplotlib.
    """
    path = Path(args.result)
    out = Path(args.out) if args.out else path.with_suffix(".png")
    try:
        result = results.load(path)
        if args.subjects is not None:
            _keep(result, args.subjects)
        draw(result, out)
    except OSError as error:
        wrong = f"{out}: {error.strerror}"
        raise InputError(f"{wrong}: --out must name a file that can be written") from error
    print(out)
    return 0


def _require_matplotlib(out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("no plot without matplotlib: pip install 'megatron-ncclep[train]'")
    from matplotlib.backend_bases import FigureCanvasBase

    if out.suffix[1:].lower() not in (kinds := FigureCanvasBase.get_supported_filetypes()):
        raise InputError(f"--out {out}: it must end in one of {', '.join(kinds)}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a whole result (see result.py): panels for each shape and training.

    Raises:
        InputError: nothing was measured, or matplotlib is missing.
    """
    _require_matplotlib(path)
    from matplotlib.figure import Figure

    # For each panel, its height in bars, and the function that draws it.
    drawn: list[tuple[int, Callable[[Any], None]]] = [
        (len(subjects), partial(_draw_shape, result=shape, subjects=subjects))
        for shape in result["shapes"]
        for subjects in table.by_kind(shape, PANELS).values()
        if subjects
    ]
    for training in result["trainings"]:
        if measured := [subject for subject in training["subjects"] if subject["step"]]:
            drawn.append((len(measured), partial(_draw_training, result=training)))
    for group in same_sizes(result["low_latency"]):
        if any(subject["passes"] for shape in group for subject in shape["subjects"]):
            drawn.append((BARS_OF_LINES, partial(_draw_low_latency, results=group)))
    if not drawn:
        raise InputError(f"no plot {path}: the result holds no times")
    columns = min(2, len(drawn))
    rows, most = -(-len(drawn) // columns), max(bars for bars, _ in drawn)
    figure = Figure(figsize=(7.5 * columns, rows * (1.4 + 0.42 * most) + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    empty = (0, lambda panel: panel.set_axis_off())
    for panel, (_, draw_panel) in zip_longest(panels, drawn, fillvalue=empty):
        draw_panel(panel)
    handles: dict[str, Any] = {}
    for panel in panels:
        handles |= dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    passes = PASSES if result["shapes"] else ()
    order = [name for name in dict.fromkeys((*passes, *PIECES, *handles)) if name in handles]
    figure.legend(
        [handles[name] for name in order], order, loc="outside upper center",
        ncols=min(len(order), LEGEND_COLUMNS * columns),
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_shape(panel: Any, result: dict[str, Any], subjects: list[dict[str, Any]]) -> None:
    computing = PANELS.get(subjects[0]["kind"], "")
    for place, subject in enumerate(subjects):
        times = {name: passed["median_us"] for name, passed in subject["passes"].items()}
        _draw_bar(panel, place, times, f"{sum(times.values()):,.0f}", "white")
    if result["limit_us"] is not None and not computing:
        limit = 4 * result["limit_us"]
        panel.axvline(limit, color=COLORS["limit"], linestyle="--", linewidth=1.5, label="limit")
    _finish_bars(panel, [table.title(subject["name"]) for subject in subjects], margin=0.18)
    panel.set_xlabel("time of one forward and backward (microseconds)")
    shape = result["shape"]
    head = f"{shape['name']}: T {shape['tokens']}, {sizes(shape)}{computing}"
    panel.set_title(textwrap.fill(head, 52), fontsize=10)


def pieces(subject: dict[str, Any], busy_known: bool) -> dict[str, float]:
    """The pieces of a training step's bar: kind -> milliseconds, without empty pieces."""
    if not subject["kinds_us"] or not busy_known:
        return {STEP: subject["step"]["median_us"] / 1e3}
    every = {**subject["kinds_us"], IDLE: table.idle_us(subject)}
    return {kind: every[kind] / 1e3 for kind in PIECES if every.get(kind)}


def _draw_training(panel: Any, result: dict[str, Any]) -> None:
    subjects = [subject for subject in result["subjects"] if subject["step"]]
    busy_known = table.is_busy_known(result)
    bars = [pieces(subject, busy_known) for subject in subjects]
    least = LABELLED_SHARE * max(sum(bar.values()) for bar in bars)
    for place, (subject, bar) in enumerate(zip(subjects, bars, strict=True)):
        busy = 100 * table.busy_us(subject) / subject["step"]["median_us"]
        busy_too = f", busy {busy:.0f} %" if subject["kinds_us"] and busy_known else ""
        speed = f"{subject['tokens_per_s']:,.0f} tokens/s"
        label = f"{sum(bar.values()):.1f} ms{busy_too}\n{speed}"
        _draw_bar(panel, place, bar, label, "#555555", least)
    names = [s["name"].removeprefix("train:").replace(":grouped", "\ngrouped") for s in subjects]
    _finish_bars(panel, names, margin=0.65)  # space for the text next to the longest bar
    panel.set_xlabel("time of one training step (milliseconds)")
    panel.set_title(textwrap.fill(table.model_sizes(result), 60), fontsize=10)


def _draw_bar(
    panel: Any, place: int, times: dict[str, float], label: str, edge: str,
    labelled: float = float("inf"),
) -> None:  # fmt: skip
    """Draw pieces side by side, then a label; pieces longer than `labelled` show their length."""
    left = 0.0
    for name, time in times.items():
        # A separate bar for each piece; the legend has each name once.
        panel.barh(
            place, time, left=left, color=COLORS[name], label=name, edgecolor=edge, linewidth=0.5,
            hatch="///" if name == IDLE else None,
        )  # fmt: skip
        if time > labelled and name != STEP:
            panel.annotate(
                f"{time:.0f}", (left + time / 2, place), ha="center", va="center", fontsize=8,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
            )  # fmt: skip
        left += time
    panel.annotate(label, (left, place), xytext=(4, 0), textcoords="offset points", va="center")


def _finish_bars(panel: Any, names: list[str], margin: float) -> None:
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.margins(x=margin)
    panel.set_xlim(left=0)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def _draw_low_latency(panel: Any, results: list[dict[str, Any]]) -> None:
    """Draw results of `same_sizes`: medians, and up to p99 shaded."""
    names = dict.fromkeys(s["name"] for r in results for s in r["subjects"] if s["passes"])
    for style, name in zip(STYLES * len(names), names, strict=False):
        found = [
            (result["shape"]["tokens"], subject["passes"])
            for result in results
            for subject in result["subjects"]
            if subject["name"] == name and subject["passes"]
        ]
        tokens = [count for count, _ in found]
        for what in PAIR:
            p50, p99 = ([p[what][key] for _, p in found] for key in ("p50_us", "p99_us"))
            label = what if len(names) == 1 else f"{name}: {what}"
            panel.plot(tokens, p50, style, marker="o", color=COLORS[what], label=label)
            panel.fill_between(tokens, p50, p99, color=COLORS[what], alpha=0.2, linewidth=0)
    every = sorted({result["shape"]["tokens"] for result in results})
    panel.set_xscale("log", base=2)
    panel.set_xticks(every, [str(count) for count in every])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens of a rank")
    panel.set_ylabel("microseconds, p50 to p99")
    where = "" if all(result["on_gpu"] for result in results) else ", ON A CPU"
    panel.set_title(f"low-latency mode{where}: {sizes(results[0]['shape'])}", fontsize=10)
    panel.grid(alpha=0.3)


def _keep(result: dict[str, Any], names: list[str]) -> None:
    """Remove all but the named subjects from a result, and put these in the given order.

    Raises:
        InputError: a name is not in it.
    """
    every = [measured for name in LISTS for measured in result[name]]
    held = {subject["name"] for measured in every for subject in measured["subjects"]}
    if missing := [name for name in names if name not in held]:
        there = ", ".join(sorted(held)) or "none"
        raise InputError(f"--subjects {missing[0]}: the result holds {there}")
    for measured in every:
        kept = [subject for subject in measured["subjects"] if subject["name"] in names]
        measured["subjects"] = sorted(kept, key=lambda subject: names.index(subject["name"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's) and return its exit status."""
    parser = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run_reporting(NAME, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
