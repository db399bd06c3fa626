"""The table: bench.json as text.  Every number is read from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.catalogue import LAUNCHED, LIBRARIES, MEGATRONS_EXPERTS, baseline, known_variant
from benchmarks.flops import step_tflops
from benchmarks.result import KINDS, LISTS
from megatron_ncclep.benchmark import STEPS, WHOLE, WITH_EXPERTS, table
from megatron_ncclep.benchmark.result import PEAK_TFLOPS
from megatron_ncclep.benchmark.table import (
    Columns,
    Measured,
    Part,
    held,
    passes_grid,
    problems,
    spread,
    subjects_grid,
)

# Shown names that differ from those on the command line.
SHORT = {"nccl-extensions": "ext", "transformer-engine": "TE", "fixed_order": "fixed"}


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
    result = _with_titles(result)
    ratios, rows = table.has_ratios(result), result["options"]["max_recv_rows"]
    blocks = [
        *(_shape(shape, rows, ratios) for shape in result["shapes"]),
        *(_training(training, ratios) for training in result["trainings"]),
        *map(table.low_latency_part, table.same_sizes(result["low_latency"])),
    ]
    return table.page("benchmarks", result, blocks, _notes(result))


def _with_titles(result: dict[str, Any]) -> dict[str, Any]:
    """The same result, in which each subject says how it is shown."""

    def shown(measured: Measured) -> Measured:
        subjects = measured["subjects"]
        return {**measured, "subjects": [{**s, "shown": title(s["name"])} for s in subjects]}

    return result | {name: [*map(shown, result[name])] for name in LISTS}


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if us < 1e4 else f"{us / 1e3:.1f}"


def by_kind(shape: Measured, kinds: Iterable[str]) -> dict[str, list[Measured]]:
    """The subjects of a shape that have times, by kind; under "" those of no kind in `kinds`."""
    found: dict[str, list[Measured]] = {kind: [] for kind in ("", *kinds)}
    for subject in shape["subjects"]:
        if subject["passes"]:
            found[subject["kind"] if subject["kind"] in found else ""].append(subject)
    return found


def _shape(result: Measured, max_recv_rows: Any, with_ratios: bool) -> list[Part]:
    products = (with_ratios and result["products_us"]) or {}
    kinds, ffn = by_kind(result, LAUNCHED), result["shape"]["ffn_hidden_size"]
    static = any(known_variant(subject["name"]).static for subject in kinds["layer"])
    layers = f"whole MoELayer, F {ffn}" + f"; static: {max_recv_rows} rows" * static
    experts = f"experts alone, F {ffn}, {result['expert_rows']} rows"

    def tables(wire: dict[str, float]) -> list[Part]:
        def passes(
            head: str, kind: str, names: Sequence[str], limit: dict[str, float], more: Columns
        ) -> list[Part]:
            return passes_grid(head, kinds[kind], names, limit, with_ratios, more)

        return [
            *passes("", "", STEPS, wire, _of(kinds[""], "lib.", "kind", "library", with_ratios)),
            *passes("through Megatron's hooks", "megatron", WHOLE, wire, {}),
            *passes(layers, "layer", WHOLE, products, {}),
            *passes(
                experts, "experts", WHOLE, products,
                _of(kinds["experts"], "Megatron's", "name", MEGATRONS_EXPERTS, with_ratios),
            ),
        ]  # fmt: skip

    return table.shape_part(result, with_ratios, tables)


def _of(
    subjects: Sequence[Measured], whose: str, key: str, value: str, with_ratios: bool
) -> Columns:
    """A column of sums divided by the least one of the subjects whose `key` is `value`."""
    least = min((s["sum_us"] for s in subjects if s[key] == value), default=None)
    if not with_ratios or (least is None and key == "name"):
        return {}
    return {f"of {whose}": lambda s: f"{s['sum_us'] / least:.2f}" if least else "-"}


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
        if result["load"] is not None:
            routing = result["shape"]["routing"]
            head += (
                f"; {routing} routing, rows of the busiest rank {result['load']:.2f} of the mean"
            )
    if result["error"]:
        return [head, f"nothing was measured: {result['error']}"]
    measured = [
        {**subject, "shown": subject["shown"].removeprefix("train:")}
        for subject in result["subjects"]
        if subject["step"]
    ]
    profiled = [subject for subject in measured if subject["kinds_us"]]
    busy = is_busy_known(result) and bool(profiled)
    times = {subject["name"]: subject["step"]["median_us"] for subject in measured}
    base = baseline(times) or next(iter(times), None)
    rates = step_tflops(result) if with_ratios else {}
    if published := result["shape"].get("published"):
        head += f"; published: {published}"
    if with_ratios and base is not None:
        head += f"; speed: times as fast as {base.removeprefix('train:')}"

    def of_kind(kind: str, s: Measured) -> str:
        return _ms(s["kinds_us"][kind])

    steps: Columns = {
        "ms": lambda s: spread(s["step"], _ms),
        "turns": lambda s: " ".join(map(_ms, s["turns_us"])),
        "tokens/s": lambda s: f"{s['tokens_per_s']:,.0f}",
        "TFLOP/s": with_ratios and (lambda s: f"{rates[s['name']]:.1f}"),
        "speed": with_ratios and (lambda s: f"{times[base] / s['step']['median_us']:.2f}"),
        "busy": busy and (lambda s: f"{100 * busy_us(s) / s['step']['median_us']:.0f}%"),
        "host": bool(profiled) and (lambda s: _ms(s["host_us"])),
        "GB held": held,
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
    parts = [head, *subjects_grid("training steps", steps, measured)]
    return [
        *parts,
        *subjects_grid("ms of GPU time", kinds, profiled),
        *problems(result["subjects"]),
    ]


# --- notes: explanations of the tables -----------------------------------------------------------


def _notes(result: dict[str, Any]) -> list[tuple[Any, str]]:
    trainings = result["trainings"]
    of_shapes = [subject for shape in result["shapes"] for subject in shape["subjects"]]
    profiled = any(subject["kinds_us"] for each in trainings for subject in each["subjects"])
    *common, last = table.notes(result)
    return [
        *common,
        (any(subject["kind"] == "library" and subject["passes"] for subject in of_shapes),
         "\"of lib.\" divides the sum by that of the fastest row of NVIDIA's library."),
        (any(subject["kind"] == "deepep" and subject["passes"] for subject in of_shapes),
         "DeepEP and HybridEP have no plan: their dispatch also exchanges the numbers of rows, "
         "for which the host waits. Of two numbers of SMs, the first is of the kernels that use "
         "the links."),
        (any(subject["kind"] in WITH_EXPERTS for subject in of_shapes),
         "Weight gradients of layers and experts are added to fp32 main_grads, and not reduced "
         "over the ranks. A subject that is one CUDA graph has only a sum. Limit is the time of "
         f"the experts' GEMMs on the rank with most rows at {PEAK_TFLOPS} TFLOP/s, with those of "
         "weight gradients also where weights are frozen. \"of Megatron's\" divides the sum by "
         "that of Megatron-Core's experts."),
        (trainings,
         "Training steps take milliseconds: the slowest rank's median and the 10th to the 90th "
         "percentile; turns are the medians of two trainings in opposite orders; TFLOP/s are of a "
         "GPU, as Megatron-LM counts them; speed compares with the fastest of Megatron-Core's own. "
         "Loss is that of the last step compared with alltoall's; apart the largest difference in "
         "nats, layer the relative one of the first MoE layer's output or gradient."),
        *((each["fused_by"],
           "Layers add weight gradients to main_grad themselves, as in training; Megatron-Core's "
           f"output layer with a function of {each['fused_by']}, the same for all subjects.")
          for each in trainings),
        (profiled,
         "The device's time by kind is from the profiler, in steps that are not timed; kernels "
         "that overlap share it. Busy is the sum, in percent of the step without profiler. Host "
         "is the host's working time per step, without waits for the device."),
        (any(s["kind"] == "library" for each in result["low_latency"] for s in each["subjects"]),
         "NVIDIA's library updates its handle with new routes before its dispatch in low-latency "
         "mode, and both count."),
        last,
    ]  # fmt: skip
