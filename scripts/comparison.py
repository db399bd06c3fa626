"""The tables and the figure of docs/comparisons.md: other libraries beside our engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import figures
from results import RESULTS, Subjects, measured_on, read, subjects, table

from benchmarks.catalogue import baseline, known_variant
from benchmarks.flops import step_tflops
from benchmarks.table import busy_us, is_busy_known
from megatron_ncclep.benchmark import STEPS
from megatron_ncclep.benchmark.result import PEAK_TFLOPS

DATE, GPU = "2026-11-27", "H100"
SHAPES = ("deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b")
OURS = "native"
_, *PARTS = STEPS  # without plan, which only some have
TE = "nccl_ep_library:transformer-engine"


def settings(*names: str) -> tuple[str, ...]:
    """These subjects with their own choice of SMs, and with others."""
    return tuple(name + sms for name in names for sms in ("", "@16", "@24", "@32"))


# Rows of the tables of sums: the run, subjects of which the fastest counts, and their name.  Each
# run begins with ours, so that a reader divides by what the ratios divide by.
Row = tuple[str, Sequence[str], str]
PASSES: list[Row] = [
    ("hybridep", (OURS,), f"`{OURS}`"),
    ("hybridep", settings("hybridep", "hybridep:fused"), "HybridEP"),
    ("deepep", (OURS,), f"`{OURS}`, second run"), ("deepep", ("native@24",), "`native@24`"),
    ("deepep", settings("deepep", "deepep:no_overlap"), "DeepEP V2"),
    ("deepep", settings("nccl_ep_library"), "NVIDIA's, of nccl-extensions"),
    ("te-library", (OURS,), f"`{OURS}`, third run"),
    ("te-library", settings(TE, f"{TE}+pull_push"), "NVIDIA's, of TransformerEngine"),
]  # fmt: skip
DISPATCHERS = ("ncclep:native", "flex_hybridep", "flex_hybridep_fused", "flex_deepep_fused",
               "alltoall", "alltoall_fused")  # fmt: skip
# Asked for, and named in the results with the reason why they have no times.
FAILING = ("flex_ncclep", "gpt-oss-120b: deepep")
# Bars of the figure, and the rows of which the fastest counts.
BARS = {
    OURS: [f"`{OURS}`"], "DeepEP V2": ["DeepEP V2"], "HybridEP": ["HybridEP"],
    "NVIDIA's libnccl_ep": ["NVIDIA's, of nccl-extensions", "NVIDIA's, of TransformerEngine"],
}  # fmt: skip


def links_us(shape: Mapping[str, Any]) -> float:
    """The time that the links need for the passes of a shape."""
    return len(PARTS) * float(shape["limit_us"])


@cache
def result(num_gpus: int, run: str) -> dict[str, Any]:
    """A run on so many GPUs."""
    return read(RESULTS / f"{DATE}-{num_gpus}x{GPU}-{run}" / "bench.json", FAILING)


@cache
def of_shapes(num_gpus: int, run: str) -> dict[str, Subjects]:
    """The subjects of a run that does not train, by shape."""
    return subjects(result(num_gpus, run), "shapes")


def fastest(num_gpus: int, run: str, names: Sequence[str], shape: str) -> tuple[str, float] | None:
    """The fastest of these subjects and its sum; None if the run has none of them."""
    of = of_shapes(num_gpus, run)[shape]
    there = [(name, float(of[name]["sum_us"])) for name in names if name in of]
    return min(there, key=lambda each: each[1], default=None)


def spread(num_gpus: int, rows: Sequence[Row], shape: str) -> str:
    """The range of the rows' sums from the 10th to the 90th percentiles of their passes."""
    shares = [0.0]
    for run, names, _ in rows:
        if (found := fastest(num_gpus, run, names, shape)) is not None:
            name, us = found
            passes = of_shapes(num_gpus, run)[shape][name]["passes"].values()
            shares += [sum(p[key] for p in passes) / us - 1 for key in ("p10_us", "p90_us")]
    return f"{100 * min(shares):+.0f}/{100 * max(shares):+.0f} %"


def times(num_gpus: int, rows: Sequence[Row], base: str, limit: Sequence[str]) -> str:
    """The sums of subjects for each shape, and how many times the one of `base` in the same run.

    `limit`: the last row, which says what bounds them.
    """

    def cell(run: str, names: Sequence[str], shape: str) -> str:
        if (found := fastest(num_gpus, run, names, shape)) is None:
            return "-"
        name, us = found
        if name == base:
            return f"{us:,.0f}"
        setting = name.removeprefix(names[0])
        of_base = us / of_shapes(num_gpus, run)[shape][base]["sum_us"]
        return f"{us:,.0f} ({of_base:.2f})" + f" `{setting}`" * bool(setting)

    lines = [[title, *(cell(run, names, s) for s in SHAPES)] for run, names, title in rows]
    spreads = ["spread, at most", *(spread(num_gpus, rows, shape) for shape in SHAPES)]
    return table(["us", *(f"{shape}:" for shape in SHAPES)], [*lines, spreads, limit])


def ours_last(names: Iterable[str]) -> list[str]:
    """Layers or training runs, Megatron-Core's first."""
    return sorted(names, key=lambda name: known_variant(name).ours)


def speed(us: Mapping[str, float], name: str) -> str:
    """How many times as fast as the fastest of Megatron-Core's a subject is, in brackets."""
    base = baseline(us)
    return " (**1**)" if name == base else f" ({us[base] / us[name]:.2f})" if base else ""


def layers(num_gpus: int) -> str:
    """Whole layers on so many GPUs."""
    us = {shape: {name: s["sum_us"] for name, s in of.items()}
          for shape, of in of_shapes(num_gpus, "layers").items()}  # fmt: skip
    rows = [
        [f"`{name.removeprefix('layer:')}`",
         *(f"{us[s][name]:,.0f}{speed(us[s], name)}" for s in SHAPES)]
        for name in ours_last(us[SHAPES[0]])
    ]  # fmt: skip
    gemms = limits(num_gpus, "layers", f"the experts' GEMMs at {PEAK_TFLOPS:.0f} TFLOP/s",
                   lambda one: sum(one["products_us"].values()))  # fmt: skip
    return table(["us", *(f"{shape}:" for shape in SHAPES)], [*rows, gemms])


def steps(measured: dict[str, Any], noisy: str = "") -> str:
    """The training steps of a result; on one GPU also how busy that is.

    `noisy`: a subject that differs from the baseline by no more than its turns do: without a ratio.
    """
    rows, trainings = [], measured["trainings"]
    busy = all(map(is_busy_known, trainings))
    for run, of in zip(trainings, subjects(measured, "trainings").values(), strict=True):
        us, rates = {name: s["step"]["median_us"] for name, s in of.items()}, step_tflops(run)
        which = f"{run['shape']['name']}: " * (len(trainings) > 1)
        for name in ours_last(of):
            each = " and ".join(f"{turn / 1000:.1f}" for turn in of[name]["turns_us"])
            rows.append([
                f"{which}`{name.removeprefix('train:')}`",
                f"{us[name] / 1000:.1f}{'' if name == noisy else speed(us, name)}", each,
                f"{of[name]['tokens_per_s']:,.0f}", f"{rates[name]:.0f}",
                *([f"{100 * busy_us(of[name]) / us[name]:.0f}"] if busy else []),
            ])  # fmt: skip
    head = ["", "ms:", "in two turns:", "tokens/s:", "TFLOP/s of a GPU:"]
    return table(head + ["GPU busy, %:"] * busy, rows)


def limits(num_gpus: int, run: str, what: str, us_of: Callable[[Any], float]) -> list[str]:
    """A row with the least time for each shape."""
    shapes = {one["shape"]["name"]: one for one in result(num_gpus, run)["shapes"]}
    return [what, *(f"{us_of(shapes[shape]):,.0f}" for shape in SHAPES)]


def tables() -> dict[str, str]:
    """The tables by name."""
    hooks: list[Row] = [("hybridep", (name,), f"`{name}`") for name in DISPATCHERS]
    links = {gpus: limits(gpus, "hybridep", "the links' time", links_us) for gpus in (4, 2)}
    made = {"hooks on 4 GPUs": times(4, hooks, DISPATCHERS[0], links[4]),
            "layers on 4 GPUs": layers(4),
            "training on 4 GPUs": steps(result(4, "training"))}  # fmt: skip
    for gpus, limit in links.items():
        made[f"libraries on {gpus} GPUs"] = times(gpus, PASSES, OURS, limit)
    return made


def figure() -> str:
    """Plan and passes on 4 GPUs, beside the time that the links need."""
    measured = result(4, "hybridep")
    groups = []
    for one in measured["shapes"]:
        shape = one["shape"]["name"]
        bars: list[tuple[str, float | None]] = []
        for title, wanted in BARS.items():
            rows = [(run, names) for run, names, name in PASSES if name in wanted]
            found = [fastest(4, run, names, shape) for run, names in rows]
            bars.append((title, min((each[1] for each in found if each), default=None)))
        groups.append((shape, links_us(one), bars))
    return figures.libraries(groups, measured_on(measured))
