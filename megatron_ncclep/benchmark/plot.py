"""Draw the result of `ncclep bench`: a bar for each subject, stacked by pass, and the limit.

The limit is the time that the rows take at the ceiling of the links, measured in the same run.
Whole layers have a panel of their own, without it.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ncclep.benchmark import result as results
from megatron_ncclep.benchmark.subjects import BOTH, STEPS, WHOLE
from megatron_ncclep.benchmark.table import title
from megatron_ncclep.benchmark.train_plot import ORDER, draw_training
from megatron_ncclep.errors import InputError

# Okabe and Ito's colours, which people with any colour vision can tell apart; neighbours in a bar
# differ in lightness too.
COLORS = {
    "plan": "#999999", "dispatch": "#0072B2", "combine": "#E69F00", "bwd_dispatch": "#56B4E9",
    "bwd_combine": "#F0E442", "forward": "#009E73", "backward": "#CC79A7",
    BOTH: "#D55E00",
}  # fmt: skip
LIMIT_COLOR = "#000000"
LEGEND_COLUMNS = 6
WITHOUT_MATPLOTLIB = "matplotlib is not installed: pip install 'megatron-ncclep[train]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ncclep plot`."""
    parser.add_argument("result", metavar="BENCH_JSON", help="bench.json of a run")
    parser.add_argument("-o", "--out", help="PNG file (default: beside the result)")
    parser.add_argument(
        "--subjects", help="draw these only, separated by commas, such as native,nccl_ep"
    )


def main(args: argparse.Namespace) -> int:
    """Run `ncclep plot` and return its exit status.

    Raises:
        InputError: no such result, nothing in it to draw, or no matplotlib.
    """
    path = Path(args.result)
    result = results.load(path)
    if args.subjects is not None:
        result = _only(result, args.subjects.split(","))
    out = Path(args.out) if args.out else path.with_suffix(".png")
    try:
        draw(result, out)
    except OSError as error:
        raise InputError(
            f"{out}: {error.strerror}: --out must name a file that can be written"
        ) from error
    print(out)
    return 0


def obstacle() -> str | None:
    """Say why nothing can be drawn here; None if it can."""
    return None if importlib.util.find_spec("matplotlib") else WITHOUT_MATPLOTLIB


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a whole result (see result.py): panels for each shape, its layers, and each training.

    Raises:
        InputError: nothing was measured, or there is no matplotlib.
    """
    if reason := obstacle():
        raise InputError(f"no plot: {reason}")
    from matplotlib.figure import Figure

    drawn: list[tuple[int, Callable[[Any], None]]] = [
        (len(subjects), partial(_draw_shape, result=shape, subjects=subjects))
        for shape in result["shapes"]
        for subjects in _measured(shape)
        if subjects
    ]
    for training in result["trainings"]:
        if measured := [subject for subject in training["subjects"] if subject["step"]]:
            drawn.append((len(measured), partial(draw_training, result=training)))
    if not drawn:
        raise InputError(f"no plot {path}: the result holds no times")
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    most = max(bars for bars, _ in drawn)
    figure = Figure(figsize=(7.5 * columns, rows * (1.4 + 0.42 * most) + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for panel, (_, draw_panel) in zip(panels, drawn, strict=False):
        draw_panel(panel)
    for panel in panels[len(drawn) :]:
        panel.set_axis_off()
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    passes = (*STEPS, *WHOLE, BOTH, "limit") if result["shapes"] else ()
    order = [name for name in dict.fromkeys((*passes, *ORDER)) if name in handles]
    figure.legend(
        [handles[name] for name in order],
        order,
        loc="outside upper center",
        ncols=min(len(order), LEGEND_COLUMNS * columns),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _measured(shape: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What was measured: all but layers, and layers."""
    measured = [subject for subject in shape["subjects"] if subject["passes"]]
    others = [subject for subject in measured if subject["kind"] != "layer"]
    return others, [subject for subject in measured if subject["kind"] == "layer"]


def _draw_shape(panel: Any, result: dict[str, Any], subjects: list[dict[str, Any]]) -> None:
    """Draw `subjects`, either layers or others, of one shape."""
    shape, layers = result["shape"], subjects[0]["kind"] == "layer"
    for place, subject in enumerate(subjects):
        left = 0.0
        for name, times in subject["passes"].items():
            # A bar of its own for each piece; the legend takes one of each name.
            panel.barh(
                place, times["median_us"], left=left, color=COLORS[name], label=name,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            left += times["median_us"]
        panel.annotate(
            f"{left:,.0f}", (left, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    if result["limit_us"] is not None and not layers:
        panel.axvline(
            4 * result["limit_us"], color=LIMIT_COLOR, linestyle="--", linewidth=1.5, label="limit"
        )
    panel.set_yticks(range(len(subjects)), [title(subject["name"]) for subject in subjects])
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlim(left=0)
    panel.set_xlabel("time of one forward and backward (microseconds)")
    panel.set_title(
        f"{shape['name']}: T {shape['tokens']}, H {shape['hidden']}, E {shape['experts']}, "
        f"K {shape['top_k']}, {shape['dtype']}{', whole MoELayer' if layers else ''}",
        fontsize=10,
    )
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def _only(result: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The result with the named subjects, in that order.

    Raises:
        InputError: a name is not in it.
    """
    listed = {key: result[key] for key in ("shapes", "trainings")}
    held = {s["name"] for kind in listed.values() for shape in kind for s in shape["subjects"]}
    if missing := [name for name in names if name not in held]:
        raise InputError(
            f"--subjects {missing[0]}: the result holds {', '.join(sorted(held)) or 'none'}"
        )
    kept = {
        key: [
            {
                **shape,
                "subjects": sorted(
                    (s for s in shape["subjects"] if s["name"] in names),
                    key=lambda subject: names.index(subject["name"]),
                ),
            }
            for shape in kind
        ]
        for key, kind in listed.items()
    }
    return {**result, **kept}
