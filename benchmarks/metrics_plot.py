"""Draw the log of `ncclep train`: the metrics of `metrics_interval`, or the losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ncclep.errors import InputError
from megatron_ncclep.training import log, report

Interval = dict[str, Any]  # of metrics.py, as in the log
# More lines than this have no legend: it would hide them.
MOST_IN_LEGEND = 16


def draw(path: Path, out: Path) -> None:
    """Draw the metrics of the log `path`, or its losses if it has no metrics, to the file `out`.

    Raises:
        InputError: there is no such log, or nothing has been trained yet.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file: give the log.jsonl of `ncclep train --out`")
    # The intervals of the log, each with the step that logged it.
    known = [
        (entry["step"], interval)
        for entry in log.read(path, "step")
        for interval in entry.get("metrics", [])
    ]
    if not known:
        settings, steps_done = log.read(path, "settings"), log.read(path, "step")
        if not (settings and steps_done):
            raise InputError(f"no plot: {path} has no steps yet")
        curves = {settings[-1]["dispatcher"]: steps_done}
        out.parent.mkdir(parents=True, exist_ok=True)
        report.draw_losses(curves, settings[-1]["unigram_entropy"], out)
        return
    from matplotlib.figure import Figure

    steps, intervals = zip(*known, strict=True)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    load, waiting, rows = figure.subplots(1, 3)
    _draw_load(load, steps, intervals)
    _draw_waiting(waiting, steps, intervals)
    _draw_rows(rows, intervals)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def _draw_load(panel: Any, steps: Sequence[int], intervals: Sequence[Interval]) -> None:
    panel.plot(steps, [each["imbalance"] for each in intervals], color="#0072B2")
    panel.set(title="Load", xlabel="step", ylim=(1, None))
    panel.set_ylabel("busiest rank over the mean, worst layer")
    if dropped := sum(each["dropped"] for each in intervals):
        panel.text(
            0.98, 0.96, f"{dropped:,} assignments dropped", ha="right", va="top",
            transform=panel.transAxes,
        )  # fmt: skip


def _draw_waiting(panel: Any, steps: Sequence[int], intervals: Sequence[Interval]) -> None:
    num_ranks = len(intervals[0]["wait_s"])
    for rank in range(num_ranks):
        waited = [1e3 * each["wait_s"][rank] / each["steps"] for each in intervals]
        panel.plot(steps, waited, label=f"rank {rank}")
    panel.set(title="Waiting for other ranks", xlabel="step", ylabel="ms per step", ylim=(0, None))
    if num_ranks <= MOST_IN_LEGEND:
        panel.legend(fontsize="small")


def _draw_rows(panel: Any, intervals: Sequence[Interval]) -> None:
    """Rows from rank to rank, all intervals together, per step."""
    num_steps = sum(each["steps"] for each in intervals)
    num_ranks = len(intervals[0]["rows"])
    ranks = range(num_ranks)
    total = [
        [sum(each["rows"][source][to] for each in intervals) / num_steps for to in ranks]
        for source in ranks
    ]
    image = panel.imshow(total, vmin=0, cmap="cividis")
    panel.figure.colorbar(image, ax=panel, label="rows per step")
    panel.set(title="Rows from rank to rank", xlabel="destination rank", ylabel="source rank")
    if num_ranks <= MOST_IN_LEGEND:
        panel.set(xticks=ranks, yticks=ranks)
