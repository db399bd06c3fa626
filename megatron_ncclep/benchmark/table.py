"""The table: bench.json as text, at most `WIDTH` columns wide.  Every number is read from it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, zip_longest
from typing import Any

from megatron_ncclep.benchmark import BOTH, LAUNCHED, PAIR, STEPS, WHOLE, WITH_EXPERTS
from megatron_ncclep.benchmark.job import LIBRARIES, MEGATRONS_EXPERTS, known_variant
from megatron_ncclep.benchmark.result import CROSSINGS, KINDS, PEAK_TFLOPS
from megatron_ncclep.ranks.nodes import Nodes

WIDTH = 100
SHARED = (
    "RANKS SHARE A GPU, up to {} of them: this checks results. Ranks take turns, so the times say "
    "nothing about speed, and no ratios are shown."
)
# A subject of the result, as read from the file.
Subject = dict[str, Any]
# Head of a column -> its cell for a subject.
Columns = dict[str, Callable[[Subject], str]]
# Shown names that differ from those on the command line.
SHORT = {"nccl-extensions": "ext", "transformer-engine": "TE", "fixed_order": "fixed"}


def title(subject: str) -> str:
    """The name under which a subject is shown."""
    base, at, sms = subject.partition("@")
    if base in LIBRARIES:
        package, modes = LIBRARIES[base]
        words = [word for word in (package, *modes) if word]
        short = "+".join(SHORT.get(word, word).replace("_", "-") for word in words)
        base = f"lib:{short}" if short else "nccl_ep (library)"
    return base + at + sms


def render(result: dict[str, Any]) -> str:
    """Turn a whole result (see result.py) into text."""
    options, machine = result["options"], result["machine"]
    where = "CPU"
    if "gpu" in machine:
        where = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver'] or 'unknown'}"
    on_each = machine.get("ranks_per_gpu", 1)
    blocks = [
        [
            f"ncclep bench {options['config']}: {options['ranks']} ranks, {where}, "
            f"{result['date']}",
            ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v),
            f"{options['samples']} samples after {options['warmup']} warm-up rounds",
            *([SHARED.format(on_each)] if on_each > 1 else ()),
        ],
        # Older results have no max_recv_rows.
        *(_shape(s, options.get("max_recv_rows"), on_each == 1) for s in result["shapes"]),
        *(_training(training, on_each == 1) for training in result["trainings"]),
        *map(_low_latency, same_sizes(result["low_latency"])),
        _notes(result),
    ]
    return "\n\n".join("\n".join(map(wrapped, block)) for block in blocks) + "\n"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-align the first column and right-align the others; cells that do not fit go below."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    lines: list[str] = []
    end = 1
    while end < len(widths):
        begin, width = end, widths[0]
        while end < len(widths) and (end == begin or width + 2 + widths[end] <= WIDTH):
            width += 2 + widths[end]
            end += 1
        lines += [""] * bool(lines)
        for row in rows:
            cells = zip(row[begin:end], widths[begin:end], strict=False)
            right = "".join(f"  {cell:>{width}}" for cell, width in cells)
            lines += [f"{row[0]:{widths[0]}}{right}".rstrip()] * bool(row[0] or right.strip())
    return lines


def wrapped(line: str) -> str:
    """Lines of at most `WIDTH` characters, in one text."""
    return textwrap.fill(
        line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _columns(
    head: str, columns: Columns, subjects: Iterable[Subject],
    below: Callable[[Subject], Sequence[str]] = lambda subject: (),
) -> list[list[str]]:  # fmt: skip
    """Rows with a head, a line for each subject, and a line below it if there is one."""
    rows = [[head, *columns]]
    for subject in subjects:
        name = title(subject["name"]).removeprefix("train:")
        rows.append([name, *(cell(subject) for cell in columns.values())])
        if more := below(subject):
            rows.append(["", *more])
    return rows


def _problems(subjects: Iterable[Subject]) -> list[str]:
    """Lines that say what was not measured and why, after an empty one; none if all succeeded."""
    words = {"unavailable": "not measured", "wrong": "WRONG", "failed": "FAILED"}
    bad = [subject for subject in subjects if subject["status"] in words]
    said = [f"{title(s['name'])}: {words[s['status']]}: {s['reason']}" for s in bad]
    return [""] * bool(bad) + said


def _held(subject: Subject) -> str:
    """A subject's memory in GB: of torch's allocator, and outside of it."""
    memory = subject["memory"]
    if memory is None:
        return "-"
    return f"{memory['torch_bytes'] / 1e9:.1f}+{memory['other_bytes'] / 1e9:.1f}"


def _shape(result: dict[str, Any], max_recv_rows: Any, with_ratios: bool) -> list[str]:
    shape, ffn = result["shape"], result["shape"]["ffn_hidden_size"]
    usual = (("skew", 0), ("alignment", 1))
    extras = "".join(f", {name} {shape[name]}" for name, value in usual if shape[name] != value)
    lines = [f"{sizes(shape)}{extras}; {result['wire_bytes'] / 1e6:.3g} MB on the wire"]
    if result["error"]:
        return [*lines, f"nothing was measured: {result['error']}"]
    lines += [*_network(result), _ceiling(result)]
    # The least times of rows on the wire and of GEMMs; empty if unknown.
    products: dict[str, float] = (with_ratios and result["products_us"]) or {}
    limit_us = result["limit_us"] if with_ratios else None
    wire = {} if limit_us is None else {name: n * limit_us for name, n in CROSSINGS.items()}
    kinds = by_kind(result, LAUNCHED)
    static = any(known_variant(subject["name"]).static for subject in kinds["layer"])
    received = f"; static: {max_recv_rows} rows" if static else ""
    experts = f"experts alone, F {ffn}, {result['expert_rows']} rows"
    for kind, head, names, limit in (
        ("", "", STEPS, wire),
        ("megatron", "through Megatron's hooks", WHOLE, wire),
        ("layer", f"whole MoELayer, F {ffn}{received}", WHOLE, products),
        ("experts", experts, WHOLE, products),
    ):
        if kinds[kind]:
            lines += ["", *_passes(head, kinds[kind], names, limit, with_ratios)]
    return lines + _problems(result["subjects"])


def by_kind(shape: dict[str, Any], kinds: Iterable[str]) -> dict[str, list[Subject]]:
    """The subjects of a shape that have times, by kind; under "" those of no kind in `kinds`."""
    found: dict[str, list[Subject]] = {kind: [] for kind in ("", *kinds)}
    for subject in shape["subjects"]:
        if subject["passes"]:
            found[subject["kind"] if subject["kind"] in found else ""].append(subject)
    return found


def sizes(shape: dict[str, Any]) -> str:
    """The name of a layer's shape, and its sizes."""
    return (
        f"{shape['name']}: T {shape['tokens']}, H {shape['hidden']}, E {shape['experts']}, "
        f"K {shape['top_k']}, {shape['dtype']}"
    )


def _network(result: dict[str, Any]) -> list[str]:
    found = result.get("network")
    if found is None:  # also in older results
        return []
    nodes = Nodes(found["machines"], found["ranks_on_each"])
    return [
        f"over the network, {nodes}: {found['hierarchical_bytes'] / 1e6:.3g} MB with a row for "
        f"each node (hierarchical, native), {found['flat_bytes'] / 1e6:.3g} MB with one for each "
        "assignment to another node (alltoall); each of the busiest rank, in one pass"
    ]


def _ceiling(result: dict[str, Any]) -> str:
    if not result["ceiling"]:
        return f"ceiling not measured: {result['ceiling_reason']}"
    found = result["ceiling"].items()
    rates = [f"{name} {rate['gb_per_s']:.0f} GB/s ({rate['num_sms']} SMs)" for name, rate in found]
    return f"ceiling for rows of {result['row_bytes']} bytes: {', '.join(rates)}"


def _passes(
    head: str, subjects: Sequence[Subject], names: Sequence[str], limit: dict[str, float],
    with_ratios: bool,
) -> list[str]:  # fmt: skip
    """A block, under `head`, of subjects with the passes `names`; for STEPS with rates.

    `limit`: pass -> the least time that it can take; empty if unknown.
    """
    rates = names is STEPS and with_ratios
    megatrons = next((s["sum_us"] for s in subjects if s["name"] == MEGATRONS_EXPERTS), None)
    library = min((s["sum_us"] for s in subjects if s["kind"] == "library"), default=None)
    columns: Columns = {"SMs": lambda s: str(s["sms"])} if names is STEPS else {}
    for name in names:
        columns[name] = lambda s, n=name: (  # type: ignore[misc]
            _time(s["passes"][n]["median_us"]) if n in s["passes"] else "-"
        )
    columns["sum"] = lambda s: _time(s["sum_us"])
    if rates:
        columns["of lib."] = lambda s: f"{s['sum_us'] / library:.2f}" if library else "-"
        columns["disp GB/s"] = lambda s: _rate(s["passes"]["dispatch"])
        columns["comb GB/s"] = lambda s: _rate(s["passes"]["combine"])
        # Older results lack them.
        if all("logical_gb_per_s" in s["passes"]["dispatch"] for s in subjects):
            columns["logical"] = lambda s: "/".join(
                _gb_per_s(s["passes"][n]["logical_gb_per_s"]) for n in ("dispatch", "combine")
            )
    if with_ratios and megatrons is not None:
        columns["of Megatron's"] = lambda s: f"{s['sum_us'] / megatrons:.2f}"
    columns |= {"GB held": _held, "check": lambda s: "ok"}
    blanks = [""] * (names is STEPS)

    def below(subject: Subject) -> list[str]:
        passes = subject["passes"]
        shown = names if BOTH not in passes else (*("" for _ in names), BOTH)
        return blanks + [_spread(passes[name]) if name in passes else "" for name in shown]

    rows = _columns(head, columns, subjects, below)
    if limit:
        least = [_time(limit[name]) if name in limit else "-" for name in names]
        total = sum(limit.get(name, 0) for name in names)
        rows.append(["limit", *blanks, *least, _time(total)])
    return align(rows)


def _time(us: float) -> str:
    return f"{us:.1f}" if us < 10 else f"{us:.0f}"


def _spread(times: dict[str, float]) -> str:
    return f"{_time(times['p10_us'])}-{_time(times['p90_us'])}"


def _rate(times: dict[str, float]) -> str:
    shown, percent = _gb_per_s(times["gb_per_s"]), times.get("percent_of_ceiling")
    return shown if percent is None else f"{shown} ({percent:.0f}%)"


def _gb_per_s(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _training(result: dict[str, Any], with_ratios: bool) -> list[str]:
    subjects, rows = result["subjects"], result["max_recv_rows"]
    headline = f"{result['shape']['name']}: model {result['shape']['model']}"
    if result["settings"]:
        static = f"; static: {rows} received rows" if rows is not None else ""
        headline = f"{model_sizes(result)}, {result['tokens']} tokens a step{static}"
    if result["error"]:
        return [headline, f"nothing was measured: {result['error']}"]
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
    s = result["settings"]
    return (
        f"{result['shape']['name']}: {s['num-layers']} layers, H {s['hidden-size']}, "
        f"{s['num-experts']} experts of {s['moe-ffn-hidden-size']}, top-{s['moe-router-topk']}, "
        f"sequence {s['seq-length']} x {s['micro-batch-size']}"
    )


def _steps(
    subjects: list[Subject], busy_known: bool, profiled: bool, with_ratios: bool
) -> list[str]:
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
    columns: Columns = {
        kind: lambda s, kind=kind: _ms(s["kinds_us"][kind])  # type: ignore[misc]
        for kind in KINDS
        if any(s["kinds_us"].get(kind) for s in subjects)
    }
    if busy_known:
        columns |= {"busy": lambda s: _ms(busy_us(s)), "idle": lambda s: _ms(idle_us(s))}
    return align(_columns("ms of GPU time", columns, subjects))


def is_busy_known(result: dict[str, Any]) -> bool:
    """Whether kernels run only as long as they work: with several ranks they wait, too."""
    settings = result["settings"]
    of_one_rank = settings["micro-batch-size"] * result["shape"]["microbatches"]
    return bool(settings["global-batch-size"] == of_one_rank)


def busy_us(subject: Subject) -> float:
    """Microseconds of a step in which the device runs anything."""
    return float(sum(subject["kinds_us"].values()))


def idle_us(subject: Subject) -> float:
    """Microseconds of a step in which it does not."""
    return max(0.0, subject["step"]["median_us"] - busy_us(subject))


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e4 else f"{us / 1e3:.1f}"


def same_sizes(results: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups of neighbouring results that differ only in their tokens."""
    return [list(group) for _, group in groupby(results, key=pair_sizes)]


def pair_sizes(result: dict[str, Any]) -> str:
    """The sizes of a shape of low-latency mode, without its tokens."""
    shape = result["shape"]
    skew = f", skew {shape['skew']}" if shape["skew"] else ""
    return f"H {shape['hidden']}, E {shape['experts']}, K {shape['top_k']}, {shape['dtype']}{skew}"


def _low_latency(results: list[dict[str, Any]]) -> list[str]:
    most = max(result["max_tokens"] or 0 for result in results)
    lines = [f"low-latency mode: {pair_sizes(results[0])}; objects for {most} tokens of a rank"]
    heads = [f"{name} {percentile}" for name in PAIR for percentile in ("p50", "p99")]
    rows = [["    T", *heads, "kB on the wire", "MB window", "check"]]
    named = []
    for result in results:
        tokens, wire = str(result["shape"]["tokens"]), f"{result['wire_bytes'] / 1e3:.1f}"
        if result["error"]:
            lines.append(f"T {tokens}: nothing was measured: {result['error']}")
        for subject in result["subjects"]:
            named.append({**subject, "name": f"{subject['name']}, T {tokens}"})
            if passes := subject["passes"]:
                times = [f"{passes[n][key]:.1f}" for n in PAIR for key in ("p50_us", "p99_us")]
                window = subject["window_bytes"]
                held = "-" if window is None else f"{window / 1e6:.1f}"
                rows.append([f"{tokens:>5} {subject['name']}", *times, wire, held, "ok"])
    if len(rows) > 1:
        lines += ["", *align(rows)]
    return lines + _problems(named)


# --- notes: explanations of the tables -----------------------------------------------------------

SHAPE_NOTES = (
    "Times are microseconds: the slowest rank's median over the samples, and below it the 10th to "
    "the 90th percentile; sum adds the medians. bwd_dispatch is the backward of combine, "
    'bwd_combine of dispatch. "of lib." divides the sum by that of the fastest row of NVIDIA\'s '
    "library (lib). GB/s is the busiest rank's rows, each once for every other rank that needs it, "
    "over the time, and percent of the ceiling; limit is their time at it; logical, of dispatch "
    "and combine, also counts rows for the rank's own experts, as DeepEP does. GB held is the most "
    "device memory of a rank: torch's peak in one round, plus memory outside of torch.",
    "On GPUs, engines are timed on a busy device, so launching them does not count; "
    "Megatron-Core's dispatchers, through their hooks, from an idle one: their host time counts.",
)
DEEPEP_NOTE = (
    "DeepEP and HybridEP have no plan: their dispatch also exchanges the numbers of rows, for "
    "which the host waits. Of two numbers of SMs, the first is of the kernels that use the links, "
    "the second of those that only copy or add rows."
)
EXPERTS_NOTE = (
    "Whole MoELayers, with router and experts, and experts alone, on the rows that they receive, "
    "are timed from an idle device too. Weight gradients are added to fp32 main_grads, on GPUs by "
    "the layers themselves, and not reduced over the ranks. A subject that is one CUDA graph has "
    "only a sum. Limit is the time of the experts' GEMMs on the rank with most rows at "
    f'{PEAK_TFLOPS} TFLOP/s (8192 x 8192 matrices in bf16 on an H100 or H200). "of Megatron\'s" '
    "divides the sum by that of Megatron-Core's experts. All share the weights and main_grads."
)
STEPS_NOTE = (
    "Training steps, from clearing gradients to Adam, without a pause; batches are on the device. "
    "Every subject trains twice, the second time in reverse order: turns are the medians of both. "
    "bf16 weights; gradients, Adam's moments and master weights in fp32, in the distributed "
    "optimizer; Megatron-LM's default fusions. Times are milliseconds: the slowest rank's median "
    'and the 10th to the 90th percentile; "speed" divides the first subject\'s time by it. '
    'Loss is that of the last step compared with alltoall\'s; "apart": the largest difference in '
    'nats, "layer" the relative one of the first MoE layer\'s output or gradient.'
)
FUSION_NOTE = (
    "Weight gradients are added to the fp32 main_grad by the layers themselves (gradient "
    "accumulation fusion), as in training: by TransformerEngine's layers, and by Megatron-Core's "
    "output layer with a function of {}, the same for all subjects."
)
PROFILE_NOTE = (
    "From the profiler, in steps that are not timed: the device's time by kind; kernels that "
    "overlap share it. With one rank, busy is their sum, in percent of the step without profiler, "
    "and idle is the rest; with several, kernels also wait for other ranks. Host is the host's "
    "working time per step, without waits for the device. Plan includes routes; permute is any "
    "kernel that reorders rows on one GPU. alltoall's transfers are collectives."
)
LOW_LATENCY_NOTE = (
    "Low-latency mode. Times are microseconds of one operation, the slowest rank's of each: the "
    "median and the 99th percentile over all operations of all samples. On GPUs a sample is a "
    "replay of a CUDA graph that alternates dispatch and combine, without experts, in which a "
    "kernel records the device's clock after each operation; its launch, half a microsecond, "
    'counts; for "pair" after each pair only. MB window is memory on each rank that the others '
    "write to. NVIDIA's library is called directly, with rows by rank like ours: before its "
    "dispatch it updates its handle with new routes, and both count."
)
NO_GPU_NOTE = (
    "NO GPU WAS USED: the times of low-latency mode are those of hosts and of gloo, and say "
    "nothing about its kernels."
)


def _notes(result: dict[str, Any]) -> list[str]:
    trainings, low_latency = result["trainings"], result["low_latency"]
    of_shapes = [
        subject
        for shape in result["shapes"]
        if shape["expert_rows"] is not None  # older results did not add gradients
        for subject in shape["subjects"]
    ]
    notes = list(SHAPE_NOTES if result["shapes"] else ())
    if any(subject["kind"] == "deepep" and subject["passes"] for subject in of_shapes):
        notes.append(DEEPEP_NOTE)
    if any(subject["kind"] in WITH_EXPERTS for subject in of_shapes):
        notes.append(EXPERTS_NOTE)
    if trainings:
        notes.append(STEPS_NOTE)
        functions = dict.fromkeys(training["fused_by"] for training in trainings)
        notes += [FUSION_NOTE.format(whose) for whose in functions if whose is not None]
    if any(s["kinds_us"] for training in trainings for s in training["subjects"]):
        notes.append(PROFILE_NOTE)
    if low_latency:
        notes.append(LOW_LATENCY_NOTE)
    if any(not found["on_gpu"] and not found["error"] for found in low_latency):
        notes.append(NO_GPU_NOTE)
    return notes
