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

from megatron_ncclep.benchmark import BOTH, LAUNCHED, PAIR, STEPS, WHOLE, WITH_EXPERTS
from megatron_ncclep.benchmark.job import LIBRARIES, MEGATRONS_EXPERTS, known_variant
from megatron_ncclep.benchmark.result import CROSSINGS, KINDS, PEAK_TFLOPS
from megatron_ncclep.ranks.nodes import Nodes

WIDTH, PROSE_WIDTH = 200, 100  # of tables, and of the lines between them
Part = str | Table
Measured = dict[str, Any]  # of a shape, or a subject of it, as in the file
# Head of a column -> its cell for a subject; not a function: without the column.
Columns = dict[str, Callable[[Measured], str] | bool]
# Shown names that differ from those on the command line.
SHORT = {"nccl-extensions": "ext", "transformer-engine": "TE", "fixed_order": "fixed"}


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


def _grid(
    head: str, columns: Columns, subjects: Sequence[Measured], last: Sequence[str] = ()
) -> list[Part]:
    """An empty line and a table of `subjects`, with the row `last`; nothing without subjects."""
    cells = {"": lambda s: title(s["name"]).removeprefix("train:")}
    cells |= {name: cell for name, cell in columns.items() if callable(cell)}
    rows = [[cell(subject) for cell in cells.values()] for subject in subjects]
    return ["", grid([head, *list(cells)[1:]], [*rows, last])] if rows else []


def title(subject: str) -> str:
    """The name under which a subject is shown."""
    base, at, sms = subject.partition("@")
    if base in LIBRARIES:
        package, modes = LIBRARIES[base]
        words = [SHORT.get(word, word).replace("_", "-") for word in (package, *modes) if word]
        base = f"lib:{'+'.join(words)}" if words else "nccl_ep (library)"
    return base + at + sms


def render(result: dict[str, Any]) -> str:
    """Turn a whole result (see result.py) into text."""
    options, machine = result["options"], result["machine"]
    where, on_each = "CPU", machine.get("ranks_per_gpu", 1)
    if "gpu" in machine:
        where = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver'] or 'unknown'}"
    blocks = [
        *(_shape(shape, options["max_recv_rows"], on_each == 1) for shape in result["shapes"]),
        *(_training(training, on_each == 1) for training in result["trainings"]),
        *map(_low_latency, same_sizes(result["low_latency"])),
    ]
    return as_text(
        f"ncclep bench {options['config']}: {options['ranks']} ranks, {where}, {result['date']}",
        ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v),
        f"{options['samples']} samples after {options['warmup']} warm-up rounds",
        *([SHARED.format(on_each)] if on_each > 1 else ()),
        *(part for block in blocks for part in ("", *block)),
        *_notes(result),
    )


def _problems(subjects: Iterable[Measured]) -> list[Part]:
    """Lines that say what was not measured and why, after an empty one; none if all succeeded."""
    words = {"unavailable": "not measured", "wrong": "WRONG", "failed": "FAILED"}
    bad = [subject for subject in subjects if subject["status"] in words]
    said = [f"{title(s['name'])}: {words[s['status']]}: {s['reason']}" for s in bad]
    return ["", *said] if bad else []


def _held(subject: Measured) -> str:
    """A subject's memory in GB: of torch's allocator, and outside of it."""
    memory = subject["memory"]
    if memory is None:
        return "-"
    return f"{memory['torch_bytes'] / 1e9:.1f}+{memory['other_bytes'] / 1e9:.1f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e4 else f"{us / 1e3:.1f}"


def _spread(times: dict[str, float], shown: Callable[[float], str]) -> str:
    """The median, and below it the 10th to the 90th percentile."""
    return f"{shown(times['median_us'])}\n{shown(times['p10_us'])}-{shown(times['p90_us'])}"


# --- shapes --------------------------------------------------------------------------------------


def sizes(shape: dict[str, Any]) -> str:
    """The sizes of a layer's shape, without its tokens."""
    usual = (("skew", 0), ("alignment", 1))
    extras = "".join(f", {name} {shape[name]}" for name, value in usual if shape[name] != value)
    of_layer = f"H {shape['hidden']}, E {shape['experts']}, K {shape['top_k']}, {shape['dtype']}"
    return of_layer + extras


def by_kind(shape: Measured, kinds: Iterable[str]) -> dict[str, list[Measured]]:
    """The subjects of a shape that have times, by kind; under "" those of no kind in `kinds`."""
    found: dict[str, list[Measured]] = {kind: [] for kind in ("", *kinds)}
    for subject in shape["subjects"]:
        if subject["passes"]:
            found[subject["kind"] if subject["kind"] in found else ""].append(subject)
    return found


def _shape(result: Measured, max_recv_rows: Any, with_ratios: bool) -> list[Part]:
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
    # The least times of rows on the wire and of GEMMs; empty if unknown.
    products = (with_ratios and result["products_us"]) or {}
    limit_us = with_ratios and result["limit_us"]
    wire = {name: n * limit_us for name, n in CROSSINGS.items()} if limit_us else {}
    kinds, ffn = by_kind(result, LAUNCHED), shape["ffn_hidden_size"]
    static = any(known_variant(subject["name"]).static for subject in kinds["layer"])
    layers = f"whole MoELayer, F {ffn}" + f"; static: {max_recv_rows} rows" * static
    experts = f"experts alone, F {ffn}, {result['expert_rows']} rows"
    return [
        *parts,
        *_passes("", kinds[""], STEPS, wire, with_ratios),
        *_passes("through Megatron's hooks", kinds["megatron"], WHOLE, wire, with_ratios),
        *_passes(layers, kinds["layer"], WHOLE, products, with_ratios),
        *_passes(experts, kinds["experts"], WHOLE, products, with_ratios),
        *_problems(result["subjects"]),
    ]


def _passes(
    head: str, subjects: Sequence[Measured], names: Sequence[str], limit: dict[str, float],
    with_ratios: bool,
) -> list[Part]:  # fmt: skip
    """A table of subjects with the passes `names`; for STEPS with rates.

    `limit`: pass -> the least time that it can take; empty if unknown.
    """
    rates = names is STEPS and with_ratios
    library = min((s["sum_us"] for s in subjects if s["kind"] == "library"), default=None)
    megatrons = next((s["sum_us"] for s in subjects if s["name"] == MEGATRONS_EXPERTS), None)

    def of_pass(name: str, s: Measured) -> str:
        return _spread(s["passes"][name], _number) if name in s["passes"] else "-"

    def rate(name: str, s: Measured) -> str:
        shown, percent = _number(s["passes"][name]["gb_per_s"]), "percent_of_ceiling"
        found = s["passes"][name].get(percent)
        return shown if found is None else f"{shown} ({found:.0f}%)"

    columns: Columns = {
        "SMs": names is STEPS and (lambda s: str(s["sms"])),
        **{name: partial(of_pass, name) for name in names},
        "sum": lambda s: of_pass(BOTH, s) if BOTH in s["passes"] else _number(s["sum_us"]),
        "of lib.": rates and (lambda s: f"{s['sum_us'] / library:.2f}" if library else "-"),
        "disp GB/s": rates and partial(rate, "dispatch"),
        "comb GB/s": rates and partial(rate, "combine"),
        "logical": rates and (lambda s: "/".join(
            _number(s["passes"][name]["logical_gb_per_s"]) for name in ("dispatch", "combine")
        )),
        "of Megatron's": with_ratios and megatrons is not None
                         and (lambda s: f"{s['sum_us'] / megatrons:.2f}"),
        "GB held": _held,
        "check": lambda s: "ok",
    }  # fmt: skip
    least = [_number(limit[name]) if name in limit else "-" for name in names]
    whole = _number(sum(limit.get(name, 0) for name in names))
    last = ["limit", *[""] * (names is STEPS), *least, whole] if limit else []
    return _grid(head, columns, subjects, last)


# --- trainings -----------------------------------------------------------------------------------


def model_sizes(result: Measured) -> str:
    """The name of a training's shape, and the sizes of its model."""
    s = result["settings"]
    return (
        f"{result['shape']['name']}: {s['num-layers']} layers, H {s['hidden-size']}, "
        f"{s['num-experts']} experts of {s['moe-ffn-hidden-size']}, top-{s['moe-router-topk']}, "
        f"sequence {s['seq-length']} x {s['micro-batch-size']}"
    )


def is_busy_known(result: Measured) -> bool:
    """Whether kernels run only as long as they work: with several ranks they wait, too."""
    settings = result["settings"]
    of_one_rank = settings["micro-batch-size"] * result["shape"]["microbatches"]
    return bool(settings["global-batch-size"] == of_one_rank)


def busy_us(subject: Measured) -> float:
    """Microseconds of a step in which the device runs anything."""
    return float(sum(subject["kinds_us"].values()))


def idle_us(subject: Measured) -> float:
    """Microseconds of a step in which it does not."""
    return max(0.0, subject["step"]["median_us"] - busy_us(subject))


def _training(result: Measured, with_ratios: bool) -> list[Part]:
    head = f"{result['shape']['name']}: model {result['shape']['model']}"
    if result["settings"]:
        rows = result["max_recv_rows"]
        static = f"; static: {rows} received rows" if rows is not None else ""
        head = f"{model_sizes(result)}, {result['tokens']} tokens a step{static}"
    if result["error"]:
        return [head, f"nothing was measured: {result['error']}"]
    measured = [subject for subject in result["subjects"] if subject["step"]]
    profiled = [subject for subject in measured if subject["kinds_us"]]
    busy = is_busy_known(result) and bool(profiled)
    first = measured[0]["step"]["median_us"] if measured else 0.0

    def of_kind(kind: str, s: Measured) -> str:
        return _ms(s["kinds_us"][kind])

    steps: Columns = {
        "ms": lambda s: _spread(s["step"], _ms),
        "turns": lambda s: " ".join(map(_ms, s["turns_us"])),
        "tokens/s": lambda s: f"{s['tokens_per_s']:,.0f}",
        "speed": with_ratios and (lambda s: f"{first / s['step']['median_us']:.2f}"),
        "busy": busy and (lambda s: f"{100 * busy_us(s) / s['step']['median_us']:.0f}%"),
        "host": bool(profiled) and (lambda s: _ms(s["host_us"])),
        "GB held": _held,
        "loss": lambda s: f"{s['losses'][-1]:.4f}",
        "apart": lambda s: f"{s['loss_apart']:.1g}",
        "layer": lambda s: f"{s['layer_apart']:.1g}",
        "check": lambda s: "ok",
    }
    kinds: Columns = {
        **{kind: any(s["kinds_us"].get(kind) for s in profiled) and partial(of_kind, kind)
           for kind in KINDS},
        "busy": busy and (lambda s: _ms(busy_us(s))),
        "idle": busy and (lambda s: _ms(idle_us(s))),
    }  # fmt: skip
    parts = [head, *_grid("training steps", steps, measured)]
    return [*parts, *_grid("ms of GPU time", kinds, profiled), *_problems(result["subjects"])]


# --- low-latency mode ----------------------------------------------------------------------------


def same_sizes(results: list[Measured]) -> list[list[Measured]]:
    """Groups of neighbouring results that differ only in their tokens."""
    return [list(group) for _, group in groupby(results, key=lambda found: sizes(found["shape"]))]


def _low_latency(results: list[Measured]) -> list[Part]:
    named = [
        {**subject, "name": f"{subject['name']}, T {result['shape']['tokens']}", "of": result}
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
        *_grid("", columns, [subject for subject in named if subject["passes"]]),
        *_problems(named),
    ]  # fmt: skip


# --- notes: explanations of the tables -----------------------------------------------------------

SHARED = (
    "RANKS SHARE A GPU, up to {} of them: this checks results. Ranks take turns, so the times say "
    "nothing about speed, and no ratios are shown."
)


def _notes(result: dict[str, Any]) -> list[Part]:
    trainings, low_latency = result["trainings"], result["low_latency"]
    of_shapes = [subject for shape in result["shapes"] for subject in shape["subjects"]]
    profiled = any(subject["kinds_us"] for each in trainings for subject in each["subjects"])
    notes = [
        (result["shapes"],
         "Times are microseconds: the slowest rank's median, and below it the 10th to the 90th "
         "percentile; sum adds medians. bwd_dispatch is the backward of combine. GB/s is the "
         "busiest rank's rows, each once for every other rank that needs it, over the time, and "
         "percent of the ceiling; limit is their time at it; logical also counts rows for the "
         "rank's own experts. \"of lib.\" divides the sum by that of the fastest row of NVIDIA's "
         "library. GB held is the most device memory of a rank: torch's peak in one round, plus "
         "memory outside of torch."),
        (any(subject["kind"] == "deepep" and subject["passes"] for subject in of_shapes),
         "DeepEP and HybridEP have no plan: their dispatch also exchanges the numbers of rows, "
         "for which the host waits. Of two numbers of SMs, the first is of the kernels that use "
         "the links."),
        (any(subject["kind"] in WITH_EXPERTS for subject in of_shapes),
         "Weight gradients of layers and experts are added to fp32 main_grads, and not reduced "
         "over the ranks. A subject that is one CUDA graph has only a sum. Limit is the time of "
         f"the experts' GEMMs on the rank with most rows at {PEAK_TFLOPS} TFLOP/s. \"of "
         "Megatron's\" divides the sum by that of Megatron-Core's experts."),
        (trainings,
         "Training steps take milliseconds: the slowest rank's median and the 10th to the 90th "
         "percentile; turns are the medians of two trainings in opposite orders; speed divides "
         "the first subject's time by it. Loss is that of the last step compared with alltoall's; "
         "apart the largest difference in nats, layer the relative one of the first MoE layer's "
         "output or gradient."),
        *((each["fused_by"],
           "Layers add weight gradients to main_grad themselves, as in training; Megatron-Core's "
           f"output layer with a function of {each['fused_by']}, the same for all subjects.")
          for each in trainings),
        (profiled,
         "The device's time by kind is from the profiler, in steps that are not timed; kernels "
         "that overlap share it. Busy is the sum, in percent of the step without profiler. Host "
         "is the host's working time per step, without waits for the device."),
        (low_latency,
         "Low-latency mode: microseconds of one operation, the slowest rank's of each, over all "
         "operations of all samples; on GPUs in replays of a CUDA graph that alternates dispatch "
         "and combine. MB window is memory on each rank that the others write to. NVIDIA's "
         "library updates its handle with new routes before its dispatch, and both count."),
        (any(not found["on_gpu"] and not found["error"] for found in low_latency),
         "NO GPU WAS USED: the times of low-latency mode are those of hosts and of gloo, and say "
         "nothing about its kernels."),
        (True, 'docs/performance.md says more under "How it was measured".'),
    ]  # fmt: skip
    shown = dict.fromkeys(note for is_needed, note in notes if is_needed)
    return [part for note in shown for part in ("", note)]
