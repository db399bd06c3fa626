"""Training steps of bench.json as text.  Every number is read from it."""

from __future__ import annotations

from typing import Any

from megatron_ncclep.benchmark.kernel_kinds import KINDS
from megatron_ncclep.benchmark.text import align, memory_held, problems, wrap
from megatron_ncclep.benchmark.train_names import TRAIN
from megatron_ncclep.benchmark.train_result import HOW

_STEPS_NOTE = (
    f"Training steps. {HOW} Shown is the median of the slowest rank in milliseconds, with the 10th "
    'to the 90th percentile below it; "speed" divides the first subject\'s time by it; "turns" are '
    "the medians of the two turns. Loss is that of the last step that is compared with alltoall's; "
    '"apart" is the largest difference of the losses in nats, "layer" the larger one of the first '
    "MoE layer's output and gradient for given hidden states, relative to their size."
)
_PROFILE_NOTE = (
    "With the profiler, apart from timing: the device's time by kind, where kernels that overlap "
    "share the time. With one rank busy is their sum, in percent of the step without profiler, "
    "and idle is the rest; with several, kernels that wait for another rank run meanwhile, "
    "longer than without the profiler, so that neither is known. Host is how long a host works "
    "at a step, waits for the device left out. Plan includes routes; permute is rows put in "
    "order on their own GPU, by whatever kernel; all kernels of the optimizer's phase but "
    "collectives are its own. alltoall's transfers are collectives."
)


def train_notes(trainings: list[dict[str, Any]]) -> list[str]:
    """What the tables of `trainings` need to be understood."""
    profiled = any(s["kinds_us"] for training in trainings for s in training["subjects"])
    return [_STEPS_NOTE] * bool(trainings) + [_PROFILE_NOTE] * profiled


def render_training(result: dict[str, Any]) -> str:
    """Turn one training's result (see train_result.py) into text."""
    lines = [_headline(result)]
    if result["error"]:
        return "\n".join([lines[0], *wrap(f"nothing was measured: {result['error']}")])
    measured = [subject for subject in result["subjects"] if subject["step"]]
    if measured:
        lines += ["", *_steps(measured, is_busy_known(result))]
    if any(subject["kinds_us"] for subject in measured):
        lines += ["", *_kinds(measured, is_busy_known(result))]
    lines += problems(result["subjects"], str)
    return "\n".join(lines)


def _headline(result: dict[str, Any]) -> str:
    settings, name = result["settings"], result["shape"]["name"]
    if not settings:
        return f"{name}: model {result['shape']['model']}"
    rows = result["max_recv_rows"]
    static = f"; static: {rows} received rows" if rows is not None else ""
    return (
        f"{name}: {settings['num-layers']} layers, H {settings['hidden-size']}, "
        f"{settings['num-experts']} experts of {settings['moe-ffn-hidden-size']}, "
        f"top-{settings['moe-router-topk']}, sequence {settings['seq-length']} x "
        f"{settings['micro-batch-size']}, {result['tokens']} tokens a step{static}"
    )


def _steps(subjects: list[dict[str, Any]], busy_known: bool) -> list[str]:
    """Time, speed, memory and losses."""
    profiled = any(subject["kinds_us"] for subject in subjects)
    head = ["ms", "turns", "tokens/s", "speed"]
    head += ["busy"] * (profiled and busy_known) + ["host"] * profiled
    rows = [["training steps", *head, "GB held", "loss", "apart", "layer", "check"]]
    first = subjects[0]["step"]["median_us"]
    for subject in subjects:
        step = subject["step"]
        cells = [
            short_name(subject),
            ms(step["median_us"]),
            " ".join(map(ms, subject["turns_us"])),
            f"{subject['tokens_per_s']:,.0f}",
            f"{first / step['median_us']:.2f}",
        ]
        if profiled and busy_known:
            cells.append(f"{100 * busy_us(subject) / step['median_us']:.0f}%")
        if profiled:
            cells.append(ms(subject["host_us"]))
        cells += [
            memory_held(subject["memory"]),
            f"{subject['losses'][-1]:.4f}",
            f"{subject['loss_apart']:.1g}",
            f"{subject['layer_apart']:.1g}",
            "ok",
        ]
        rows.append(cells)
        rows.append(["", f"{ms(step['p10_us'])}-{ms(step['p90_us'])}"])
    return align(rows)


def _kinds(subjects: list[dict[str, Any]], busy_known: bool) -> list[str]:
    """The device's time by kind of kernel."""
    kinds = [k for k in KINDS if any(s["kinds_us"].get(k) for s in subjects)]
    rows = [["ms of GPU time", *kinds, *["busy", "idle"] * busy_known]]
    for subject in subjects:
        if subject["kinds_us"]:
            shares = [ms(subject["kinds_us"][kind]) for kind in kinds]
            rest = [ms(busy_us(subject)), ms(idle_us(subject))] * busy_known
            rows.append([short_name(subject), *shares, *rest])
    return align(rows)


def is_busy_known(result: dict[str, Any]) -> bool:
    """Say whether kernels run only as long as they work: with several ranks they wait, too."""
    settings, shape = result["settings"], result["shape"]
    of_one_rank = settings["micro-batch-size"] * shape["microbatches"]
    return bool(settings["global-batch-size"] == of_one_rank)


def busy_us(subject: dict[str, Any]) -> float:
    """Microseconds of a step in which the device runs anything."""
    return float(sum(subject["kinds_us"].values()))


def idle_us(subject: dict[str, Any]) -> float:
    """Microseconds of a step in which it does not."""
    return max(0.0, subject["step"]["median_us"] - busy_us(subject))


def ms(us: float) -> str:
    """Microseconds as milliseconds, three digits or so."""
    milliseconds = us / 1e3
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def short_name(subject: dict[str, Any]) -> str:
    """Without the word that is in the head."""
    return str(subject["name"]).removeprefix(TRAIN)
