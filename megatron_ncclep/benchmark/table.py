"""The table: bench.json as text.  Every number is read from it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ncclep.benchmark import BOTH, PAIR, STEPS
from megatron_ncclep.benchmark.result import CROSSINGS
from megatron_ncclep.ranks.nodes import Nodes

WIDTH, PROSE_WIDTH = 200, 100  # of tables, and of the lines between them
Part = str | Table
Measured = dict[str, Any]  # of a shape, or a subject of it, as in the file
# Head of a column -> its cell for a subject; not a function: without the column.
Columns = dict[str, Callable[[Measured], str] | bool]


def as_text(*parts: Part) -> str:
    """Lines of prose, which are wrapped, and tables, one below the other."""
    # Without markup and emojis: names and reasons hold brackets and colons.
    console = Console(
        file=(file := io.StringIO()), width=WIDTH, force_terminal=False, markup=False, emoji=False,
        highlight=False,
    )  # fmt: skip
    for part in parts:
        if isinstance(part, Table):
            console.print(part)
        else:
            file.write(textwrap.fill(part, PROSE_WIDTH, break_long_words=False) + "\n")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with its first column on the left and the others on the right."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def shown(subject: Measured) -> str:
    """The name under which a subject is shown."""
    return str(subject.get("shown", subject["name"]))


def subjects_grid(
    head: str, columns: Columns, subjects: Sequence[Measured], last: Sequence[str] = ()
) -> list[Part]:
    """An empty line and a table of `subjects`, with the row `last`; nothing without subjects."""
    cells: dict[str, Callable[[Measured], str]] = {"": shown}
    cells |= {name: cell for name, cell in columns.items() if callable(cell)}
    rows = [[cell(subject) for cell in cells.values()] for subject in subjects]
    return ["", grid([head, *list(cells)[1:]], [*rows, last])] if rows else []


def render(result: dict[str, Any]) -> str:
    """Turn a whole result of `ncclep bench` (see result.py) into text."""
    blocks = [
        *(shape_part(shape, has_ratios(result)) for shape in result["shapes"]),
        *map(low_latency_part, same_sizes(result["low_latency"])),
    ]
    return page("ncclep bench", result, blocks, notes(result))


def has_ratios(result: dict[str, Any]) -> bool:
    """Whether times can be compared: no ranks share a GPU."""
    return bool(result["machine"].get("ranks_per_gpu", 1) == 1)


def page(
    command: str, result: dict[str, Any], blocks: Iterable[Sequence[Part]],
    notes: Sequence[tuple[Any, str]],
) -> str:  # fmt: skip
    """The text of a result of `command`: its head, blocks, and the notes that are needed."""
    options, machine = result["options"], result["machine"]
    where, on_each = "CPU", machine.get("ranks_per_gpu", 1)
    if "gpu" in machine:
        where = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver'] or 'unknown'}"
    needed = dict.fromkeys(note for is_needed, note in notes if is_needed)
    return as_text(
        f"{command} {options['config']}: {options['ranks']} ranks, {where}, {result['date']}",
        ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v),
        f"{options['samples']} samples after {options['warmup']} warm-up rounds",
        *([SHARED.format(on_each)] if on_each > 1 else ()),
        *(part for block in blocks for part in ("", *block)),
        *(part for note in needed for part in ("", note)),
    )


def problems(subjects: Iterable[Measured]) -> list[Part]:
    """Lines that say what was not measured and why, after an empty one; none if all succeeded."""
    words = {"unavailable": "not measured", "wrong": "WRONG", "failed": "FAILED"}
    bad = [subject for subject in subjects if subject["status"] in words]
    said = [f"{shown(s)}: {words[s['status']]}: {s['reason']}" for s in bad]
    return ["", *said] if bad else []


def held(subject: Measured) -> str:
    """A subject's memory in GB: of torch's allocator, and outside of it."""
    memory = subject["memory"]
    if memory is None:
        return "-"
    return f"{memory['torch_bytes'] / 1e9:.1f}+{memory['other_bytes'] / 1e9:.1f}"


def number(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def spread(times: dict[str, float], text: Callable[[float], str]) -> str:
    """The median, and below it the 10th to the 90th percentile."""
    return f"{text(times['median_us'])}\n{text(times['p10_us'])}-{text(times['p90_us'])}"


# --- shapes --------------------------------------------------------------------------------------


def sizes(shape: dict[str, Any]) -> str:
    """The sizes of a layer's shape, without its tokens."""
    usual = (("skew", 0), ("alignment", 1))
    extras = "".join(f", {name} {shape[name]}" for name, value in usual if shape[name] != value)
    of_layer = f"H {shape['hidden']}, E {shape['experts']}, K {shape['top_k']}, {shape['dtype']}"
    return of_layer + extras


def shape_part(
    result: Measured, with_ratios: bool,
    tables: Callable[[dict[str, float]], list[Part]] | None = None,
) -> list[Part]:  # fmt: skip
    """The part of one shape.

    `tables`: what makes its tables from the least time of each pass (empty if unknown); None: one
    table of all subjects.
    """
    shape, wire_mb = result["shape"], result["wire_bytes"] / 1e6
    head = f"{shape['name']}: T {shape['tokens']}, {sizes(shape)}; {wire_mb:.3g} MB on the wire"
    if result["error"]:
        return [head, f"nothing was measured: {result['error']}"]
    parts: list[Part] = [head]
    if found := result["network"]:
        parts.append(
            f"over the network, {Nodes(found['machines'], found['ranks_on_each'])}: "
            f"{found['hierarchical_bytes'] / 1e6:.3g} MB with a row for each node (hierarchical, "
            f"native), {found['flat_bytes'] / 1e6:.3g} MB with one for each assignment to another "
            "node (alltoall); each of the busiest rank, in one pass"
        )
    rates = ", ".join(
        f"{name} {rate['gb_per_s']:.0f} GB/s ({rate['num_sms']} SMs)"
        for name, rate in result["ceiling"].items()
    )
    ceiling = f"ceiling for rows of {result['row_bytes']} bytes: {rates}"
    parts.append(ceiling if rates else f"ceiling not measured: {result['ceiling_reason']}")
    limit_us = with_ratios and result["limit_us"]
    wire = {name: n * limit_us for name, n in CROSSINGS.items()} if limit_us else {}
    if tables is None:
        measured = [subject for subject in result["subjects"] if subject["passes"]]
        made = passes_grid("", measured, STEPS, wire, with_ratios)
    else:
        made = tables(wire)
    return [*parts, *made, *problems(result["subjects"])]


def passes_grid(
    head: str, subjects: Sequence[Measured], names: Sequence[str], limit: dict[str, float],
    with_ratios: bool, more: Columns | None = None,
) -> list[Part]:  # fmt: skip
    """A table of subjects with the passes `names`; for STEPS with rates.

    `limit`: pass -> the least time that it can take; empty if unknown.  `more`: columns behind the
    sum.
    """
    rates = names is STEPS and with_ratios

    def of_pass(name: str, s: Measured) -> str:
        return spread(s["passes"][name], number) if name in s["passes"] else "-"

    def rate(name: str, s: Measured) -> str:
        text, percent = number(s["passes"][name]["gb_per_s"]), "percent_of_ceiling"
        found = s["passes"][name].get(percent)
        return text if found is None else f"{text} ({found:.0f}%)"

    columns: Columns = {
        "SMs": names is STEPS and (lambda s: str(s["sms"])),
        **{name: partial(of_pass, name) for name in names},
        "sum": lambda s: of_pass(BOTH, s) if BOTH in s["passes"] else number(s["sum_us"]),
        **(more or {}),
        "disp GB/s": rates and partial(rate, "dispatch"),
        "comb GB/s": rates and partial(rate, "combine"),
        "logical": rates and (lambda s: "/".join(
            number(s["passes"][name]["logical_gb_per_s"]) for name in ("dispatch", "combine")
        )),
        "GB held": held,
        "check": lambda s: "ok",
    }  # fmt: skip
    least = [number(limit[name]) if name in limit else "-" for name in names]
    whole = number(sum(limit.get(name, 0) for name in names))
    last = ["limit", *[""] * (names is STEPS), *least, whole] if limit else []
    return subjects_grid(head, columns, subjects, last)


# --- low-latency mode ----------------------------------------------------------------------------


def same_sizes(results: list[Measured]) -> list[list[Measured]]:
    """Groups of neighbouring results that differ only in their tokens."""
    return [list(group) for _, group in groupby(results, key=lambda found: sizes(found["shape"]))]


def low_latency_part(results: list[Measured]) -> list[Part]:
    """The part of results of `same_sizes`."""
    named = [
        {**subject, "shown": f"{shown(subject)}, T {result['shape']['tokens']}", "of": result}
        for result in results
        for subject in result["subjects"]
    ]

    def time(name: str, percentile: str, s: Measured) -> str:
        return f"{s['passes'][name][f'{percentile}_us']:.1f}"

    columns: Columns = {
        f"{name} {p}": partial(time, name, p) for name in PAIR for p in ("p50", "p99")
    }
    columns |= {
        "kB on the wire": lambda s: f"{s['of']['wire_bytes'] / 1e3:.1f}",
        "MB window": lambda s: f"{s['window_bytes'] / 1e6:.1f}" if s["window_bytes"] else "-",
        "check": lambda s: "ok",
    }
    most = max(result["max_tokens"] or 0 for result in results)
    return [
        f"low-latency mode: {sizes(results[0]['shape'])}; objects for {most} tokens of a rank",
        *(f"T {result['shape']['tokens']}: nothing was measured: {result['error']}"
          for result in results if result["error"]),
        *subjects_grid("", columns, [subject for subject in named if subject["passes"]]),
        *problems(named),
    ]  # fmt: skip


# --- notes: explanations of the tables -----------------------------------------------------------

SHARED = (
    "RANKS SHARE A GPU, up to {} of them: this checks results. Ranks take turns, so the times say "
    "nothing about speed, and no ratios are shown."
)


def notes(result: dict[str, Any]) -> list[tuple[Any, str]]:
    """Notes, each with whether the result needs it."""
    low_latency = result["low_latency"]
    return [
        (result["shapes"],
         "Times are microseconds: the slowest rank's median, and below it the 10th to the 90th "
         "percentile; sum adds medians. bwd_dispatch is the backward of combine. GB/s is the "
         "busiest rank's rows, each once for every other rank that needs it, over the time, and "
         "percent of the ceiling; limit is their time at it; logical also counts rows for the "
         "rank's own experts. GB held is the most device memory of a rank: torch's peak in one "
         "round, plus memory outside of torch."),
        (low_latency,
         "Low-latency mode: microseconds of one operation, the slowest rank's of each, over all "
         "operations of all samples; on GPUs in replays of a CUDA graph that alternates dispatch "
         "and combine. MB window is memory on each rank that the others write to."),
        (any(not found["on_gpu"] and not found["error"] for found in low_latency),
         "NO GPU WAS USED: the times of low-latency mode are those of hosts and of gloo, and say "
         "nothing about its kernels."),
        (True, 'docs/performance.md says more under "How it was measured".'),
    ]  # fmt: skip
