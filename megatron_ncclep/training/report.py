"""Rank 0's output from the logs: the loss plot and the summary."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from megatron_ncclep.training import corpus, log
from megatron_ncclep.training.job import Job

# Printed below the table, because its tokens/s are not those of the GPU kernels.
REFERENCE = "ncclep's engine reference: the readable engine for CPUs; the fast kernels need GPUs"
Entry = dict[str, Any]  # of a step, as in log.py


def differences(ours: list[Entry], other: list[Entry]) -> dict[int, float]:
    """Step -> loss difference in nats, for the steps that both logs have."""
    losses = {entry["step"]: entry["loss"] for entry in other}
    return {e["step"]: e["loss"] - losses[e["step"]] for e in ours if e["step"] in losses}


def finish(job: Job) -> None:
    """Draw loss.png and print the summary from the logs on disk."""
    curves = {name: log.read(job.log_path(name), "step") for name in job.dispatchers()}
    plot = Path(job.out) / "loss.png"
    prepared = corpus.load(job.data_folder)
    draw_losses(curves, prepared.unigram_entropy, plot)
    _print_summary(job, curves, prepared, plot)


def draw_losses(curves: dict[str, list[Entry]], unigram_entropy: float, path: Path) -> None:
    """Draw the loss over the steps, and below it the difference if there are two curves.

    Args:
        curves: dispatcher -> step entries; the first one is compared with the second.
        unigram_entropy: in nats per token.
    """
    from matplotlib.figure import Figure

    two = len(curves) == 2
    figure = Figure(figsize=(8, 6 if two else 4.5), layout="constrained")
    axes = figure.subplots(
        2 if two else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1] if two else [1]
    )[:, 0]
    for (name, entries), style in zip(curves.items(), ("-", "--"), strict=False):
        steps = [entry["step"] for entry in entries]
        axes[0].plot(steps, [entry["loss"] for entry in entries], style, label=name, linewidth=1.2)
    entropy = f"unigram entropy of the text, {unigram_entropy:.2f} nats"
    axes[0].axhline(unigram_entropy, color="0.4", linestyle=":", label=entropy)
    axes[0].set_ylabel("training loss (nats per token)")
    axes[0].grid(alpha=0.3)
    axes[0].legend()
    if two:
        apart = differences(*curves.values())
        axes[1].plot(list(apart), list(apart.values()), color="tab:red", linewidth=1.0)
        # Equal curves get the scale of one fp32 rounding, not one that matplotlib chooses.
        limit = max(map(abs, apart.values()), default=0.0) * 1.2 or 1e-7
        axes[1].set_ylim(-limit, limit)
        axes[1].set_ylabel(f"{' - '.join(curves)}\n(nats per token)")
        axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        axes[1].grid(alpha=0.3)
    axes[-1].set_xlabel("step (optimizer updates)")
    figure.savefig(path, dpi=120)


def _print_summary(
    job: Job, curves: dict[str, list[Entry]], prepared: corpus.Corpus, plot: Path
) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("", *(Column(name, justify="right") for name in curves))
    labels = ("steps", "first loss (nats)", "last loss (nats)", "validation loss (nats)",
              "unigram entropy (nats)", "tokens/s (median)")  # fmt: skip
    columns = [_summary(job.log_path(name), steps, prepared) for name, steps in curves.items()]
    for row in zip(labels, *columns, strict=True):
        table.add_row(*row)
    ends = [log.read(job.log_path(name), "end") for name in curves]
    shares = [end[-1].get("dropped_share", 0.0) if end else 0.0 for end in ends]
    if any(shares):
        table.add_row("assignments dropped", *(f"{100 * share:.2g} %" for share in shares))
    if job.compare is not None:
        apart = differences(*curves.values())
        step = max(apart, key=lambda step: abs(apart[step]))
        table.add_section()
        where = f"at step {step}" if apart[step] else "same bits"
        table.add_row("largest difference (nats)", f"{abs(apart[step]):.2e}", where)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\n{job.model}, trained on {prepared.source}")
    console.print(table)
    settings = [entry for name in curves for entry in log.read(job.log_path(name), "settings")]
    if any(entry.get("engine") == "reference" for entry in settings):
        console.print(REFERENCE)
    console.print(f"log, plot and checkpoint: {job.out}/{log.NAME}, {plot}, {job.out}/checkpoint/")


def _summary(path: Path, steps: list[Entry], prepared: corpus.Corpus) -> list[str]:
    """The column of one training, whose log is `path`."""
    if not steps:
        return ["-"] * 6
    ends = log.read(path, "end")
    return [
        str(steps[-1]["step"]),
        f"{steps[0]['loss']:.4f}",
        f"{steps[-1]['loss']:.4f}",
        f"{ends[-1]['valid_loss']:.4f}" if ends else "-",
        f"{prepared.unigram_entropy:.4f}",
        f"{statistics.median(entry['tokens_per_s'] for entry in steps):,.0f}",
    ]
