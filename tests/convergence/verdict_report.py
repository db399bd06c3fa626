"""Write a verdict down: table.md and loss.png."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from arm_log import Training
from arms import CONTROL, Arm
from verdict import ArmVerdict, Verdict

PLOT, TABLE = "loss.png", "table.md"
# Steps over which curves are averaged before they are drawn; nothing is judged by them.
SMOOTHED_STEPS = 25
# What differs from the control by more lies beyond the edge.
DRAWN_MARGINS = 2.5
# Okabe and Ito's colours; the control is black, mistakes are dotted.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999")


def write_report(verdict: Verdict, out: Path) -> str:
    """Write the plot and the table of a verdict into `out`, and return the table."""
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(_table(verdict)) + "\n"
    (out / TABLE).write_text(text, encoding="utf-8")
    draw(verdict, out / PLOT)
    return text


def _table(verdict: Verdict) -> list[str]:
    word = "holds" if verdict.holds else "DOES NOT HOLD"
    lines = [f"The protocol {word}.", ""]
    lines += [
        "| arm | seeds | verdict | because | begins apart by | learnt, nats | ± of 90 % "
        "| tokens/s | GB |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(arm) for arm in verdict.arms]
    lines.append("")
    if verdict.spread is not None:
        spread = verdict.spread
        lines += [
            f"Allowed: {spread.margin:.5f} nats, which two seeds of {CONTROL} exceed in 5 of 100 "
            f"cases. Noise that neither seed nor arm explains: {spread.noise:.5f} nats "
            f"({spread.degrees} degrees of freedom).",
            "",
        ]
    if verdict.not_run:
        lines += ["Not run to the end:", "", *(f"- {text}" for text in verdict.not_run), ""]
    return lines + _conditions(verdict.trainings)


def _row(verdict: ArmVerdict) -> str:
    own = verdict.trainings
    seeds = " ".join(str(t.seed) for t in sorted(own, key=lambda t: t.seed)) or "-"
    apart = [t.start["layer_apart"] for t in own if t.start.get("layer_apart") is not None]
    whole = [t.learnt for t in own if t.is_whole]
    learnt, interval = (f"{np.mean(whole):.4f}" if whole else "-"), "-"
    if verdict.effect is not None and verdict.arm.same_bits_as is None:
        learnt, interval = f"{verdict.effect.nats:+.5f}", f"{verdict.effect.half_width:.5f}"
    cells = [
        verdict.arm.name,
        seeds,
        _status(verdict),
        verdict.reason.replace("|", "/").replace("\n", " "),
        f"{max(apart):.2g}" if apart else "-",
        learnt,
        interval,
        f"{np.median([t.tokens_per_s for t in own]):,.0f}" if own else "-",
        _memory(own),
    ]
    return f"| {' | '.join(cells)} |"


def _status(verdict: ArmVerdict) -> str:
    if verdict.arm.mistake is None:
        return verdict.status
    return f"rejected ({verdict.status})" if verdict.is_as_wanted else f"{verdict.status}: NOT SEEN"


def _memory(own: list[Training]) -> str:
    held = [t.end["memory"] for t in own if t.end is not None and t.end["memory"] is not None]
    if not held:
        return "-"
    # The first training of a process also pays for what later ones find there.
    parts = (min(memory[name] for memory in held) for name in ("torch_bytes", "other_bytes"))
    return "+".join(f"{part / 1e9:.1f}" for part in parts)


def _conditions(trainings: list[Training]) -> list[str]:
    """What was trained, on what, and where; from a run that says so."""
    told = next((t.settings for t in trainings if "machine" in t.settings), None)
    if told is None:
        return []
    values, machine, versions = told["settings"], told["machine"], told["versions"]
    tokens = values["global-batch-size"] * values["seq-length"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if "gpu" in machine else "CPU"
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        f"{values['num-layers']} layers of hidden size {values['hidden-size']}, "
        f"{values['num-experts']} experts of {values['moe-ffn-hidden-size']}, top-"
        f"{values['moe-router-topk']}, {'bf16' if values['bf16'] else 'fp32'}, "
        f"{values['transformer-impl']}; {_parameters(told):,} parameters, "
        f"{told['ranks']} ranks with expert parallelism {told['ranks']}. "
        f"{values['train-iters']} steps of {tokens:,} tokens; text: {told['text']}, "
        f"{told['text_tokens']:,} tokens, entropy of its letters {told['entropy']:.3f} nats.",
        "",
        f"{where}; {known}.",
    ]


def _parameters(told: dict[str, Any]) -> int:
    """Of the whole model; every rank has its own experts and the same of the rest."""
    values = told["settings"]
    experts = (
        3 * values["hidden-size"] * values["moe-ffn-hidden-size"] * values["num-experts"]
    ) * values["num-layers"]
    return sum(told["parameters_of_ranks"]) - (told["ranks"] - 1) * (
        told["parameters_of_ranks"][0] - experts // told["ranks"]
    )


def draw(verdict: Verdict, path: Path) -> None:
    """Draw the curves, their distance to the control's of the same seed, and the effects."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 12), layout="constrained")
    curves, distances, effects = figure.subplots(3, 1, height_ratios=[3, 2, 2])
    controls = {t.seed: t for t in verdict.trainings if t.arm == CONTROL}
    others = [arm for arm in verdict.size.arms if arm.name != CONTROL]
    colors = {arm.name: color for arm, color in zip(others, itertools.cycle(COLORS), strict=False)}
    colors[CONTROL] = "black"
    for arm in verdict.size.arms:
        own = sorted((t for t in verdict.trainings if t.arm == arm.name), key=lambda t: t.seed)
        style = {"color": colors[arm.name], "linestyle": "-" if arm.mistake is None else ":"}
        for training in own:
            _draw_training(curves, distances, training, controls, arm, style, training is own[0])
    curves.set_ylabel("training loss (nats per token)")
    if any(t.losses for t in verdict.trainings):
        curves.legend(fontsize=8)
    curves.grid(alpha=0.3)
    curves.set_yscale("log")
    curves.yaxis.set_major_formatter("{x:g}")
    curves.yaxis.set_minor_formatter("{x:g}")
    curves.set_title(
        f"{len(verdict.trainings)} trainings, smoothed; an arm has a line for each of its seeds",
        fontsize=10,
    )
    distances.set_ylabel(f"distance to {CONTROL}\nof the same seed (nats)")
    distances.set_xlabel("step")
    distances.grid(alpha=0.3)
    if verdict.spread is not None:
        for line in (-verdict.spread.margin, verdict.spread.margin):
            distances.axhline(line, color="0.4", linestyle="--", linewidth=1)
        limit = DRAWN_MARGINS * verdict.spread.margin
        distances.set_ylim(-limit, limit)
    _draw_effects(effects, verdict, colors)
    figure.savefig(path, dpi=120)


def _draw_training(
    curves: Any,
    distances: Any,
    training: Training,
    controls: dict[int, Training],
    arm: Arm,
    style: dict[str, str],
    is_first: bool,
) -> None:
    steps, losses = _smoothed(training.losses)
    label = arm.name if is_first else None
    curves.plot(steps, losses, linewidth=1, label=label, **style)
    control = controls.get(training.seed)
    if arm.name == CONTROL or control is None:
        return
    both = min(len(training.losses), len(control.losses))
    apart = np.array(training.losses[:both]) - np.array(control.losses[:both])
    distances.plot(*_smoothed(apart.tolist()), linewidth=1, **style)


def _smoothed(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Means over stretches of steps, at the middle of each; what is left over is left out."""
    width = max(1, min(SMOOTHED_STEPS, len(values) // 4))
    count = len(values) // width
    means = np.array(values[: count * width]).reshape(count, width).mean(axis=1)
    return np.arange(count) * width + (width + 1) / 2, means


def _draw_effects(panel: Any, verdict: Verdict, colors: dict[str, str]) -> None:
    shown = [arm for arm in verdict.arms if arm.effect is not None and arm.arm.same_bits_as is None]
    for place, arm in enumerate(shown):
        assert arm.effect is not None
        panel.errorbar(
            arm.effect.nats, place, xerr=arm.effect.half_width, fmt="o", capsize=4,
            color=colors[arm.arm.name],
        )  # fmt: skip
    panel.set_yticks(range(len(shown)), [f"{arm.arm.name}: {_status(arm)}" for arm in shown])
    panel.set_ylim(-0.5, max(1, len(shown)) - 0.5)
    panel.invert_yaxis()
    panel.axvline(0, color="black", linewidth=0.8)
    if verdict.spread is not None:
        margin = verdict.spread.margin
        panel.axvspan(-margin, margin, color="0.9", zorder=0)
        panel.set_xlim(-DRAWN_MARGINS * margin, DRAWN_MARGINS * margin)
        for place, arm in enumerate(shown):
            assert arm.effect is not None
            if abs(arm.effect.nats) > DRAWN_MARGINS * margin:
                side = math.copysign(0.98 * DRAWN_MARGINS * margin, arm.effect.nats)
                panel.annotate(
                    f"{arm.effect.nats:+.3f}, beyond the edge", (side, place), va="center",
                    ha="right" if side > 0 else "left", color=colors[arm.arm.name],
                )  # fmt: skip
    panel.set_xlabel(
        "effect on the validation loss of the second half, with its 90 % interval (nats)\ngrey: "
        "what two seeds of the control differ by"
    )
    panel.grid(axis="x", alpha=0.3)
