"""The table: bench.json as text, at most `WIDTH` columns wide.  Every number is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ncclep.benchmark.catalogue import LIBRARIES
from megatron_ncclep.benchmark.layer_names import parse_layer
from megatron_ncclep.benchmark.subjects import BOTH, LAUNCHED, STEPS, WHOLE
from megatron_ncclep.benchmark.text import align, memory_held, problems, wrap
from megatron_ncclep.benchmark.train_table import render_training, train_notes

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

NOTES = (
    "Times are microseconds: the median over the samples of the slowest rank, all ranks starting "
    "together, and below it the 10th to the 90th percentile; sum adds the medians. bwd_dispatch is "
    'the backward of combine, bwd_combine the backward of dispatch. "of lib." divides the sum by '
    "that of the quickest row of NVIDIA's library (lib: called directly). GB/s is the busiest "
    "rank's rows, each counted once for every other rank that needs it, over the time; in "
    "brackets, percent of the ceiling. Limit is the time of these rows at the ceiling. GB held is "
    "device memory on the rank that takes most: the peak of torch's allocator during one round, "
    "plus what is held outside of it.",
    "On GPUs the passes of engines are timed while the device is kept busy, so that launching them "
    "does not count. Megatron-Core's dispatchers are timed through their hooks, with identity "
    "experts, from an idle device: their host time counts. A whole MoELayer is timed likewise, "
    "with its router, its experts and their weight gradients; compare layers with each other only. "
    "One that is one CUDA graph has only a sum, the time of a replay, which keeps all gradients. "
    "GB held counts the weights, which all layers share, for each of them.",
)


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
    trainings = result["trainings"]
    rows = options.get("max_recv_rows")  # older results have none
    shapes = [_shape(shape, rows) for shape in result["shapes"]]
    blocks = ["\n".join(head), *shapes, *map(render_training, trainings)]
    explained = [*(NOTES if result["shapes"] else ()), *train_notes(trainings)]
    notes = "\n".join(line for note in explained for line in wrap(note))
    return "\n\n".join([*blocks, notes]) + "\n"


def _shape(result: dict[str, Any], max_recv_rows: Any) -> str:
    shape = result["shape"]
    usual = {"skew": 0, "alignment": 1}
    extras = "".join(f", {name} {shape[name]}" for name in usual if shape[name] != usual[name])
    lines = [
        f"{shape['name']}: T {shape['tokens']}, H {shape['hidden']}, E {shape['experts']}, "
        f"K {shape['top_k']}, {shape['dtype']}{extras}; {result['wire_bytes'] / 1e6:.3g} MB on "
        "the wire",
        _ceiling(result),
    ]
    if result["error"]:
        lines[1:] = wrap(f"nothing was measured: {result['error']}")
        return "\n".join(lines)
    measured = [s for s in result["subjects"] if s["passes"]]
    engines = [s for s in measured if s["kind"] not in LAUNCHED]
    dispatchers = [s for s in measured if s["kind"] == "megatron"]
    layers = [s for s in measured if s["kind"] == "layer"]
    if engines:
        lines += ["", *_engines(engines, result["limit_us"])]
    if dispatchers:
        lines += ["", *_wholes("through Megatron's hooks", dispatchers, result["limit_us"])]
    if layers:
        # The limit is that of rows on the wire, and says nothing about experts.
        size = f"whole MoELayer, F {shape['ffn_hidden_size']}"
        if any(parse_layer(subject["name"]).static for subject in layers):
            size += f"; static: {max_recv_rows} rows"
        lines += ["", *_wholes(size, layers, None)]
    lines += problems(result["subjects"], title)
    return "\n".join(lines)


def _ceiling(result: dict[str, Any]) -> str:
    if not result["ceiling"]:
        return f"ceiling not measured: {result['ceiling_reason']}"
    rates = ", ".join(
        f"{name} {rate['gb_per_s']:.0f} GB/s ({rate['num_sms']} SMs)"
        for name, rate in result["ceiling"].items()
    )
    return f"ceiling for rows of {result['row_bytes']} bytes: {rates}"


def _engines(subjects: Sequence[dict[str, Any]], limit_us: float | None) -> list[str]:
    """The block of what has a plan and four passes."""
    library = min((s["sum_us"] for s in subjects if s["kind"] == "library"), default=None)
    rows = [
        [
            "", "SMs", *STEPS, "sum", "of lib.", "disp GB/s", "comb GB/s", "GB held",
            "check",
        ]
    ]  # fmt: skip
    for subject in subjects:
        passes = subject["passes"]
        ratio = f"{subject['sum_us'] / library:.2f}" if library else "-"
        rows.append(
            [
                title(subject["name"]),
                subject["sms"],
                *(_time(passes[name]["median_us"]) for name in STEPS),
                _time(subject["sum_us"]),
                ratio,
                _rate(passes["dispatch"]),
                _rate(passes["combine"]),
                memory_held(subject["memory"]),
                "ok",
            ]
        )
        rows.append(["", "", *(_spread(passes[name]) for name in STEPS)])
    if limit_us is not None:
        least = [_time(limit_us)] * (len(STEPS) - 1)
        rows.append(["limit", "", "-", *least, _time(limit_us * (len(STEPS) - 1))])
    return align(rows)


def _wholes(head: str, subjects: Sequence[dict[str, Any]], limit_us: float | None) -> list[str]:
    """A block of what has a forward and a backward, under `head`."""
    rows = [[head, *WHOLE, "sum", "GB held", "check"]]
    for subject in subjects:
        passes = subject["passes"]
        rows.append(
            [
                title(subject["name"]),
                *(_time(passes[name]["median_us"]) if name in passes else "-" for name in WHOLE),
                _time(subject["sum_us"]),
                memory_held(subject["memory"]),
                "ok",
            ]
        )
        shown = WHOLE if BOTH not in passes else ("", "", BOTH)
        rows.append(["", *(_spread(passes[name]) if name else "" for name in shown)])
    if limit_us is not None:
        rows.append(["limit", *[_time(2 * limit_us)] * 2, _time(4 * limit_us)])
    return align(rows)


def _time(us: float) -> str:
    return f"{us:.1f}" if us < 10 else f"{us:.0f}"


def _spread(times: dict[str, float]) -> str:
    return f"{_time(times['p10_us'])}-{_time(times['p90_us'])}"


def _rate(times: dict[str, float]) -> str:
    percent = times.get("percent_of_ceiling")
    rate = times["gb_per_s"]
    shown = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return shown if percent is None else f"{shown} ({percent:.0f}%)"
