"""Draw training steps: a bar for each subject, its device's time by kind of kernel and idle time.

Without a profile, and with several ranks, a bar is the step's time.
"""

from __future__ import annotations

from typing import Any

from megatron_ncclep.benchmark.kernel_kinds import KINDS
from megatron_ncclep.benchmark.train_table import busy_us, idle_us, is_busy_known, short_name

IDLE, STEP = "idle", "step"
# Okabe and Ito's colours and a grey; what has the name of a pass has its colour too (plot.py).
COLORS = {
    "attention": "#F0E442", "GEMM": "#56B4E9", "dispatch": "#0072B2", "combine": "#E69F00",
    "plan": "#999999", "permute": "#CC79A7", "optimizer": "#009E73", "collectives": "#D55E00",
    "rest": "#DDDDDD", IDLE: "#FFFFFF", STEP: "#56B4E9",
}  # fmt: skip
ORDER = (*KINDS, IDLE, STEP)
# Narrower pieces have no room for their number.
LABELLED_SHARE = 0.06


def pieces(subject: dict[str, Any], busy_known: bool) -> dict[str, float]:
    """Kind -> milliseconds, in the order in which they are drawn; pieces without time left out."""
    if not subject["kinds_us"] or not busy_known:
        return {STEP: subject["step"]["median_us"] / 1e3}
    every = {**subject["kinds_us"], IDLE: idle_us(subject)}
    return {kind: every[kind] / 1e3 for kind in ORDER if every.get(kind)}


def draw_training(panel: Any, result: dict[str, Any]) -> None:
    """Draw the measured subjects of one training into a panel of matplotlib's."""
    subjects = [subject for subject in result["subjects"] if subject["step"]]
    busy_known = is_busy_known(result)
    bars = [pieces(subject, busy_known) for subject in subjects]
    longest = max(sum(bar.values()) for bar in bars)
    for place, (subject, bar) in enumerate(zip(subjects, bars, strict=True)):
        left = 0.0
        for kind, milliseconds in bar.items():
            panel.barh(
                place, milliseconds, left=left, color=COLORS[kind], label=kind,
                edgecolor="#555555", linewidth=0.5, hatch="///" if kind == IDLE else None,
            )  # fmt: skip
            if milliseconds > LABELLED_SHARE * longest and kind != STEP:
                panel.annotate(
                    f"{milliseconds:.0f}", (left + milliseconds / 2, place), ha="center",
                    va="center", fontsize=8,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
                )  # fmt: skip
            left += milliseconds
        busy = 100 * busy_us(subject) / subject["step"]["median_us"]
        told = f", busy {busy:.0f} %" if subject["kinds_us"] and busy_known else ""
        speed = f"{subject['tokens_per_s']:,.0f} tokens/s"
        panel.annotate(
            f"{left:.1f} ms{told}\n{speed}", (left, place), va="center", fontsize=9,
            xytext=(4, 0), textcoords="offset points",
        )  # fmt: skip
    settings = result["settings"]
    panel.set_yticks(
        range(len(subjects)),
        [short_name(subject).replace(":grouped", "\ngrouped") for subject in subjects],
        fontsize=9,
    )
    panel.invert_yaxis()
    panel.margins(x=0.42)  # room for the words beside the longest bar
    panel.set_xlim(left=0)
    panel.set_xlabel("time of one training step (milliseconds)")
    panel.set_title(
        f"{result['shape']['name']}: {settings['num-layers']} layers, H {settings['hidden-size']},"
        f"\n{settings['num-experts']} experts of {settings['moe-ffn-hidden-size']}, top-"
        f"{settings['moe-router-topk']}, sequence {settings['seq-length']} x "
        f"{settings['micro-batch-size']}",
        fontsize=10,
    )
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
