"""What rank 0 shows and draws: progress, the loss plot and the summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ncclep.training import corpus, log

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_ncclep.training.job import Job

Show = Callable[[dict[str, Any]], None]


@contextmanager
def progress(dispatcher: str, done: int, total: int, print_every: int, rank: int) -> Iterator[Show]:
    """Give a function that shows a step's log entry: a bar on a terminal, otherwise lines.

    Args:
        done, total: steps done before and steps in all.
        print_every: steps between two lines when stdout is not a terminal.
        rank: only rank 0 shows anything.
    """
    from rich.console import Console

    if rank != 0:
        yield lambda entry: None
        return
    console = Console()
    if not console.is_terminal:
        yield _line_printer(dispatcher, done, total, print_every)
        return
    with _bar(console, dispatcher, done, total) as show:
        yield show


def _line_printer(dispatcher: str, done: int, total: int, every: int) -> Show:
    def show(entry: dict[str, Any]) -> None:
        step = entry["step"]
        if step == done + 1 or step == total or step % every == 0:
            print(
                f"{dispatcher}: step {step}/{total}  loss {entry['loss']:.4f}  "
                f"grad norm {entry['grad_norm']:.3f}  lr {entry['lr']:.2e}  "
                f"{entry['tokens_per_s']:,.0f} tokens/s  balance {entry['balance']:.2f}",
                flush=True,
            )

    return show


@contextmanager
def _bar(console: Console, dispatcher: str, done: int, total: int) -> Iterator[Show]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn(
            "loss {task.fields[loss]:.3f}  {task.fields[tokens_per_s]:,.0f} tokens/s  "
            "balance {task.fields[balance]:.2f}"
        ),
    )
    with Progress(*columns, console=console) as bar:
        nothing = float("nan")
        task = bar.add_task(
            dispatcher, total=total, completed=done, loss=nothing, tokens_per_s=nothing,
            balance=nothing,
        )  # fmt: skip
        yield lambda entry: bar.update(
            task,
            completed=entry["step"],
            loss=entry["loss"],
            tokens_per_s=entry["tokens_per_s"],
            balance=entry["balance"],
        )


def largest_difference(
    ours: list[dict[str, Any]], other: list[dict[str, Any]]
) -> tuple[float, int]:
    """The largest |loss difference| over the steps that both logs have, in nats, and its step."""
    losses = {entry["step"]: entry["loss"] for entry in other}
    return max(
        (abs(entry["loss"] - losses[entry["step"]]), entry["step"])
        for entry in ours
        if entry["step"] in losses
    )


def finish(job: Job) -> None:
    """Draw loss.png and print the summary from the logs on disk."""
    curves = {name: log.steps(job.folder(name)) for name in job.dispatchers()}
    plot = Path(job.out) / "loss.png"
    prepared = corpus.load(job.data_folder)
    draw(curves, prepared.unigram_entropy, plot)
    _print_summary(job, curves, prepared, plot)


def draw(curves: dict[str, list[dict[str, Any]]], unigram_entropy: float, path: Path) -> None:
    """Draw the loss over the steps, and below it the difference if there are two curves.

    Args:
        curves: dispatcher -> step entries; the second one is what the first is compared with.
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
    axes[0].axhline(
        unigram_entropy,
        color="0.4",
        linestyle=":",
        label=f"unigram entropy of the text, {unigram_entropy:.2f} nats",
    )
    axes[0].set_ylabel("training loss (nats per token)")
    axes[0].grid(alpha=0.3)
    axes[0].legend()
    if two:
        _draw_difference(axes[1], *curves.items())
    axes[-1].set_xlabel("step (optimizer updates)")
    figure.savefig(path, dpi=120)


def _draw_difference(
    axes: Any,
    first: tuple[str, list[dict[str, Any]]],
    second: tuple[str, list[dict[str, Any]]],
) -> None:
    """Draw the difference of two (name, step entries) over the steps that both have."""
    losses = {entry["step"]: entry["loss"] for entry in second[1]}
    shared = [entry for entry in first[1] if entry["step"] in losses]
    differences = [entry["loss"] - losses[entry["step"]] for entry in shared]
    axes.plot([entry["step"] for entry in shared], differences, color="tab:red", linewidth=1.0)
    # Equal curves get the scale of one fp32 rounding, not that of matplotlib's choice.
    limit = max(map(abs, differences), default=0.0) * 1.2 or 1e-7
    axes.set_ylim(-limit, limit)
    axes.set_ylabel(f"{first[0]} - {second[0]}\n(nats per token)")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes.grid(alpha=0.3)


def _print_summary(
    job: Job, curves: dict[str, list[dict[str, Any]]], prepared: corpus.Corpus, plot: Path
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for name in curves:
        table.add_column(name, justify="right")

    def row(label: str, value: Callable[[str, list[dict[str, Any]]], str]) -> None:
        cells = (value(name, entries) if entries else "-" for name, entries in curves.items())
        table.add_row(label, *cells)

    row("steps", lambda name, entries: str(entries[-1]["step"]))
    row("first loss (nats)", lambda name, entries: f"{entries[0]['loss']:.4f}")
    row("last loss (nats)", lambda name, entries: f"{entries[-1]['loss']:.4f}")
    row("validation loss (nats)", lambda name, entries: _valid_loss(job.folder(name)))
    row("unigram entropy (nats)", lambda name, entries: f"{prepared.unigram_entropy:.4f}")
    row(
        "tokens/s (median)",
        lambda name, entries: f"{statistics.median(e['tokens_per_s'] for e in entries):,.0f}",
    )
    if job.compare is not None:
        difference, step = largest_difference(curves[job.dispatcher], curves[job.compare])
        table.add_section()
        where = f"at step {step}" if difference else "same bits"
        table.add_row("largest difference (nats)", f"{difference:.2e}", where)
    console = Console()
    console.print(f"\n{job.model}, trained on {prepared.source}", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"log, plot and checkpoint: {job.out}/{log.NAME}, {plot}, {job.out}/checkpoint/",
        highlight=False,
        soft_wrap=True,
    )


def _valid_loss(folder: Path) -> str:
    ends = [entry for entry in log.read(folder) if entry["type"] == "end"]
    return f"{ends[-1]['valid_loss']:.4f}" if ends else "-"
