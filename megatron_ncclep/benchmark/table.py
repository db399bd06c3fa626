"""The table: bench.json as text, at most `WIDTH` columns wide.  Every number is read from it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ncclep.benchmark.kernel_kinds import KINDS
from megatron_ncclep.benchmark.names import LAYERS, LIBRARIES, MEGATRONS_EXPERTS, TRAININGS
from megatron_ncclep.benchmark.notes import notes
from megatron_ncclep.benchmark.result import CROSSINGS
from megatron_ncclep.benchmark.subjects import BOTH, LAUNCHED, PAIR, STEPS, WHOLE
from megatron_ncclep.ranks.nodes import Nodes

WIDTH = 140
SHARED = (
    "RANKS SHARE A GPU, up to {} of them: this checks results. Ranks take turns, so that the times "
    "say nothing of speed, and no ratios are shown."
)
# A subject of the result, as read.
Subject = dict[str, Any]
# Head of a column -> its cell for a subject.
Columns = dict[str, Callable[[Subject], str]]
# Shown names that differ from those on the command line.
SHORT = {
    "nccl-extensions": "ext", "transformer-engine": "TE", "pull_push": "pull-push",
    "fixed_order": "fixed",
}  # fmt: skip
TITLES = {
    name: f"lib:{'+'.join(SHORT[word] for word in (package, *modes))}"
    if package
    else "nccl_ep (library)"
    for name, (package, modes) in LIBRARIES.items()
}


def title(subject: str) -> str:
    """The name under which a subject is shown."""
    base, at, sms = subject.partition("@")
    return TITLES.get(base, base) + at + sms


def render(result: dict[str, Any]) -> str:
    """Turn a whole result (see result.py) into text."""
    options, machine = result["options"], result["machine"]
    where = "CPU"
    if "gpu" in machine:
        where = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver'] or 'unknown'}"
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v)
    head = [
        f"ncclep bench {options['config']}: {options['ranks']} ranks, {where}, {result['date']}",
        *wrap(versions),
        f"{options['samples']} samples after {options['warmup']} warm-up rounds",
    ]
    rows = options.get("max_recv_rows")  # older results have none
    shared = machine.get("ranks_per_gpu", 1) > 1
    if shared:
        head += wrap(SHARED.format(machine["ranks_per_gpu"]))
    blocks = [
        head,
        *(_shape(shape, rows, not shared) for shape in result["shapes"]),
        *(_training(training, not shared) for training in result["trainings"]),
        *map(_low_latency, same_sizes(result["low_latency"])),
    ]
    blocks.append([line for note in notes(result) for line in wrap(note)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


# --- lines and columns ---------------------------------------------------------------------------


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-align the first column and right-align the others; no trailing blanks."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(max(map(len, rows))):
        grid.add_column(justify="right" if column else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    # Wider than any table: nothing is cut, whatever the terminal.
    console = Console(width=10 * WIDTH, color_system=None, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(grid, highlight=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def wrap(text: str) -> list[str]:
    """Lines of at most `WIDTH` characters."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _columns(
    head: str,
    columns: Columns,
    subjects: Iterable[Subject],
    below: Callable[[Subject], Sequence[str]] = lambda subject: (),
) -> list[list[str]]:
    """Rows with a head, a line for each subject, and a line below it where there is any."""
    rows = [[head, *columns]]
    for subject in subjects:
        name = title(subject["name"]).removeprefix(TRAININGS.prefix)
        rows.append([name, *(cell(subject) for cell in columns.values())])
        if more := below(subject):
            rows.append(["", *more])
    return rows


def _problems(subjects: Iterable[Subject]) -> list[str]:
    """Lines that say what was not measured and why, after an empty one; none if all is well."""
    words = {"unavailable": "not measured", "wrong": "WRONG", "failed": "FAILED"}
    reasons = [
        f"{title(s['name'])}: {words[s['status']]}: {s['reason']}"
        for s in subjects
        if s["status"] != "ok"
    ]
    return ["", *(line for reason in reasons for line in wrap(reason))] if reasons else []


def _held(subject: Subject) -> str:
    """A subject's memory in GB: of torch's allocator, and outside of it."""
    memory = subject["memory"]
    if memory is None:
        return "-"
    return "+".join(f"{memory[name] / 1e9:.1f}" for name in ("torch_bytes", "other_bytes"))


# --- passes of a layer's routing -----------------------------------------------------------------


def _shape(result: dict[str, Any], max_recv_rows: Any, with_ratios: bool) -> list[str]:
    shape, ffn = result["shape"], result["shape"]["ffn_hidden_size"]
    wire, products = _limits(result) if with_ratios else ({}, {})
    usual = {"skew": 0, "alignment": 1}
    extras = "".join(f", {name} {shape[name]}" for name in usual if shape[name] != usual[name])
    lines = [
        f"{sizes(shape)}{extras}; {result['wire_bytes'] / 1e6:.3g} MB on the wire",
        *_network(result),
        _ceiling(result),
    ]
    if result["error"]:
        return [lines[0], *wrap(f"nothing was measured: {result['error']}")]
    measured = [s for s in result["subjects"] if s["passes"]]
    engines = [s for s in measured if s["kind"] not in LAUNCHED]
    dispatchers = [s for s in measured if s["kind"] == "megatron"]
    layers = [s for s in measured if s["kind"] == "layer"]
    experts = [s for s in measured if s["kind"] == "experts"]
    if engines:
        lines += ["", *_passes("", engines, STEPS, wire, with_ratios)]
    if dispatchers:
        lines += ["", *_passes("through Megatron's hooks", dispatchers, WHOLE, wire)]
    if layers:
        size = f"whole MoELayer, F {ffn}"
        if any(LAYERS.parse(subject["name"]).static for subject in layers):
            size += f"; static: {max_recv_rows} rows"
        lines += ["", *_passes(size, layers, WHOLE, products)]
    if experts:
        size = f"experts alone, F {ffn}, {result['expert_rows']} rows"
        lines += ["", *_passes(size, experts, WHOLE, products, with_ratios)]
    return lines + _problems(result["subjects"])


def _limits(result: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Pass -> its least time, of rows on the wire and of products; empty where it is not known."""
    limit_us, products_us = result["limit_us"], result["products_us"]
    wire = {} if limit_us is None else {name: n * limit_us for name, n in CROSSINGS.items()}
    return wire, products_us or {}


def sizes(shape: dict[str, Any]) -> str:
    """The name of a layer's shape, and its sizes."""
    return (
        f"{shape['name']}: T {shape['tokens']}, H {shape['hidden']}, E {shape['experts']}, "
        f"K {shape['top_k']}, {shape['dtype']}"
    )


def _network(result: dict[str, Any]) -> list[str]:
    """What crosses the network where there is one; older results do not know."""
    found = result.get("network")
    if found is None:
        return []
    nodes = Nodes(found["machines"], found["ranks_on_each"])
    return wrap(
        f"over the network, {nodes}: {found['hierarchical_bytes'] / 1e6:.3g} MB with "
        f"hierarchical, {found['flat_bytes'] / 1e6:.3g} MB with a row for each assignment to "
        "another node (alltoall); each of the busiest rank, in one pass"
    )


def _ceiling(result: dict[str, Any]) -> str:
    if not result["ceiling"]:
        return f"ceiling not measured: {result['ceiling_reason']}"
    rates = ", ".join(
        f"{name} {rate['gb_per_s']:.0f} GB/s ({rate['num_sms']} SMs)"
        for name, rate in result["ceiling"].items()
    )
    return f"ceiling for rows of {result['row_bytes']} bytes: {rates}"


def _passes(
    head: str,
    subjects: Sequence[Subject],
    names: Sequence[str],
    limit: dict[str, float],
    with_ratios: bool = True,
) -> list[str]:
    """A block, under `head`, of subjects with the passes `names`; of STEPS with rates.

    Args:
        limit: pass -> the least time that it can take; empty if that is not known.
    """
    rates = names is STEPS and with_ratios
    megatrons = next((s["sum_us"] for s in subjects if s["name"] == MEGATRONS_EXPERTS), None)
    library = min((s["sum_us"] for s in subjects if s["kind"] == "library"), default=None)
    columns: Columns = {"SMs": lambda s: str(s["sms"])} if names is STEPS else {}
    columns |= {name: _median(name) for name in names}
    columns["sum"] = lambda s: _time(s["sum_us"])
    if rates:
        columns["of lib."] = lambda s: f"{s['sum_us'] / library:.2f}" if library else "-"
        columns["disp GB/s"] = lambda s: _rate(s["passes"]["dispatch"])
        columns["comb GB/s"] = lambda s: _rate(s["passes"]["combine"])
    if with_ratios and megatrons is not None:
        columns["of Megatron's"] = lambda s: f"{s['sum_us'] / megatrons:.2f}"
    columns |= {"GB held": _held, "check": lambda s: "ok"}
    blanks = [""] * (names is STEPS)

    def below(subject: Subject) -> list[str]:
        passes = subject["passes"]
        shown = names if BOTH not in passes else (*("" for _ in names), BOTH)
        return blanks + [_spread(passes[name]) if name else "" for name in shown]

    rows = _columns(head, columns, subjects, below)
    if limit:
        least = [_time(limit[name]) if name in limit else "-" for name in names]
        total = sum(limit.get(name, 0) for name in names)
        rows.append(["limit", *blanks, *least, _time(total)])
    return align(rows)


def _median(name: str) -> Callable[[Subject], str]:
    return lambda s: _time(s["passes"][name]["median_us"]) if name in s["passes"] else "-"


def _time(us: float) -> str:
    return f"{us:.1f}" if us < 10 else f"{us:.0f}"


def _spread(times: dict[str, float]) -> str:
    return f"{_time(times['p10_us'])}-{_time(times['p90_us'])}"


def _rate(times: dict[str, float]) -> str:
    percent = times.get("percent_of_ceiling")
    rate = times["gb_per_s"]
    shown = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return shown if percent is None else f"{shown} ({percent:.0f}%)"


# --- training steps ------------------------------------------------------------------------------


def _training(result: dict[str, Any], with_ratios: bool) -> list[str]:
    settings, name, subjects = result["settings"], result["shape"]["name"], result["subjects"]
    headline = f"{name}: model {result['shape']['model']}"
    if settings:
        rows = result["max_recv_rows"]
        static = f"; static: {rows} received rows" if rows is not None else ""
        headline = f"{model_sizes(result)}, {result['tokens']} tokens a step{static}"
    if result["error"]:
        return [headline, *wrap(f"nothing was measured: {result['error']}")]
    measured = [subject for subject in subjects if subject["step"]]
    profiled = [subject for subject in measured if subject["kinds_us"]]
    lines = [headline]
    if measured:
        lines += ["", *_steps(measured, is_busy_known(result), bool(profiled), with_ratios)]
    if profiled:
        lines += ["", *_kinds(profiled, is_busy_known(result))]
    return lines + _problems(subjects)


def model_sizes(result: dict[str, Any]) -> str:
    """The name of a training's shape, and the sizes of its model."""
    settings = result["settings"]
    return (
        f"{result['shape']['name']}: {settings['num-layers']} layers, H {settings['hidden-size']}, "
        f"{settings['num-experts']} experts of {settings['moe-ffn-hidden-size']}, "
        f"top-{settings['moe-router-topk']}, sequence {settings['seq-length']} x "
        f"{settings['micro-batch-size']}"
    )


def _steps(
    subjects: list[Subject], busy_known: bool, profiled: bool, with_ratios: bool
) -> list[str]:
    """Time, speed, memory and losses."""
    first = subjects[0]["step"]["median_us"]
    columns: Columns = {
        "ms": lambda s: _ms(s["step"]["median_us"]),
        "turns": lambda s: " ".join(map(_ms, s["turns_us"])),
        "tokens/s": lambda s: f"{s['tokens_per_s']:,.0f}",
    }
    if with_ratios:
        columns["speed"] = lambda s: f"{first / s['step']['median_us']:.2f}"
    if profiled and busy_known:
        columns["busy"] = lambda s: f"{100 * busy_us(s) / s['step']['median_us']:.0f}%"
    if profiled:
        columns["host"] = lambda s: _ms(s["host_us"])
    columns |= {
        "GB held": _held,
        "loss": lambda s: f"{s['losses'][-1]:.4f}",
        "apart": lambda s: f"{s['loss_apart']:.1g}",
        "layer": lambda s: f"{s['layer_apart']:.1g}",
        "check": lambda s: "ok",
    }
    below = lambda s: [f"{_ms(s['step']['p10_us'])}-{_ms(s['step']['p90_us'])}"]  # noqa: E731
    return align(_columns("training steps", columns, subjects, below))


def _kinds(subjects: list[Subject], busy_known: bool) -> list[str]:
    """The device's time by kind of kernel."""
    columns: Columns = {
        kind: lambda s, kind=kind: _ms(s["kinds_us"][kind])  # type: ignore[misc]
        for kind in KINDS
        if any(s["kinds_us"].get(kind) for s in subjects)
    }
    if busy_known:
        columns |= {"busy": lambda s: _ms(busy_us(s)), "idle": lambda s: _ms(idle_us(s))}
    return align(_columns("ms of GPU time", columns, subjects))


def is_busy_known(result: dict[str, Any]) -> bool:
    """Say whether kernels run only as long as they work: with several ranks they wait, too."""
    settings, shape = result["settings"], result["shape"]
    of_one_rank = settings["micro-batch-size"] * shape["microbatches"]
    return bool(settings["global-batch-size"] == of_one_rank)


def busy_us(subject: Subject) -> float:
    """Microseconds of a step in which the device runs anything."""
    return float(sum(subject["kinds_us"].values()))


def idle_us(subject: Subject) -> float:
    """Microseconds of a step in which it does not."""
    return max(0.0, subject["step"]["median_us"] - busy_us(subject))


def _ms(us: float) -> str:
    """Microseconds as milliseconds, three digits or so."""
    milliseconds = us / 1e3
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


# --- low-latency mode ----------------------------------------------------------------------------


def same_sizes(results: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results that differ in their tokens only, together; neighbours."""
    return [list(group) for _, group in groupby(results, key=pair_sizes)]


def pair_sizes(result: dict[str, Any]) -> str:
    """The sizes of a shape of low-latency mode, less its tokens."""
    shape = result["shape"]
    skew = f", skew {shape['skew']}" if shape["skew"] else ""
    return f"H {shape['hidden']}, E {shape['experts']}, K {shape['top_k']}, {shape['dtype']}{skew}"


def _low_latency(results: list[dict[str, Any]]) -> list[str]:
    """Results of `same_sizes` as text."""
    most = max(result["max_tokens"] or 0 for result in results)
    lines = [f"low-latency mode: {pair_sizes(results[0])}; objects for {most} tokens of a rank"]
    heads = [f"{name} {percentile}" for name in PAIR for percentile in ("p50", "p99")]
    rows = [["T", "", *heads, "kB on the wire", "MB window", "check"]]
    told = []
    for result in results:
        tokens, wire = str(result["shape"]["tokens"]), f"{result['wire_bytes'] / 1e3:.1f}"
        if result["error"]:
            lines += wrap(f"T {tokens}: nothing was measured: {result['error']}")
        for subject in result["subjects"]:
            told.append({**subject, "name": f"{subject['name']}, T {tokens}"})
            if passes := subject["passes"]:
                times = [f"{passes[n][key]:.1f}" for n in PAIR for key in ("p50_us", "p99_us")]
                window = subject["window_bytes"]
                held = "-" if window is None else f"{window / 1e6:.1f}"
                rows.append([tokens, subject["name"], *times, wire, held, "ok"])
    if len(rows) > 1:
        lines += ["", *align(rows)]
    return lines + _problems(told)
