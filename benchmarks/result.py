"""Results of trainings, and reading a whole bench.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.flops import TEXT_VOCABULARY
from megatron_ncclep.benchmark.ranks import quantiles
from megatron_ncclep.benchmark.result import (
    FORMAT,
    Measured,
    Outcome,
    ShapeResult,
    SubjectResult,
    spread,
)
from megatron_ncclep.errors import InputError

# The kinds of kernels in a training step, in the order of the table.
KINDS = (
    "attention", "GEMM", "dispatch", "combine", "plan", "permute", "optimizer", "collectives",
    "rest",
)  # fmt: skip


@dataclass
class TrainResult(Outcome):
    """One subject that trains."""

    step: dict[str, float] = field(default_factory=dict)  # as a pass of a SubjectResult
    turns_us: list[float] = field(default_factory=list)  # the median of each turn
    tokens_per_s: float | None = None  # of all ranks, at the median
    losses: list[float] = field(default_factory=list)  # of the first steps, mean over the ranks
    loss_apart: float | None = None  # their largest distance from the control's, in nats
    layer_apart: float | None = None  # the first MoE layer's from the control's, relative
    kinds_us: dict[str, float] = field(default_factory=dict)  # kind of kernel -> time of a step
    host_us: float | None = None  # the slowest host's of a step, without waits for its device
    memory: dict[str, int] | None = None
    num_parameters: int | None = None  # of one rank

    def set_samples(self, turns: Sequence[Sequence[float]], tokens: int) -> None:
        """Summarise the slowest rank's microseconds of every step, by turn."""
        self.step = spread([sample for turn in turns for sample in turn])
        self.turns_us = [quantiles(turn, 0.5)[0] for turn in turns]
        self.tokens_per_s = tokens / self.step["median_us"] * 1e6


@dataclass
class TrainingResult(Measured):
    """Training steps of one model and batch."""

    settings: dict[str, Any] = field(default_factory=dict)  # the model's arguments
    tokens: int = 0  # of all ranks in one step
    text: str = ""  # the training text's description
    vocab_size: int = TEXT_VOCABULARY  # rows of the embedding and of the output layer
    load: float | None = None  # rows of the busiest rank in the first step, divided by the mean
    max_recv_rows: int | str | None = None  # of static subjects
    # The owner of the function that adds the output layer's weight gradients to main_grad, if the
    # layers add theirs themselves; None: DistributedDataParallel's hooks add all of them.
    fused_by: str | None = None


# Lists of bench.json -> the type of each entry, and of its subjects.
LISTS: dict[str, tuple[type[Measured], type[Outcome]]] = {
    "shapes": (ShapeResult, SubjectResult),
    "trainings": (TrainingResult, TrainResult),
    "low_latency": (ShapeResult, SubjectResult),
}


def load(path: Path) -> dict[str, Any]:
    """Read a result that `save` wrote.

    Raises:
        InputError: there is no such file, or it is not such a result.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: give the bench.json of a run") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a result of `ncclep bench` in format {FORMAT}")
    for name, (kind, subject) in LISTS.items():
        content[name] = _read(path, name, content.get(name, []), kind)
        for measured in content[name]:
            measured["subjects"] = _read(path, "subjects", measured["subjects"], subject)
    return content


def _read(path: Path, name: str, listed: Any, kind: type) -> list[dict[str, Any]]:
    """Read a list of `kind`s; older results lack some fields, and have others that are gone."""
    known = [f.name for f in dataclasses.fields(kind)]
    try:
        held = [{key: item[key] for key in known if key in item} for item in listed]
        return [dataclasses.asdict(kind(**item)) for item in held]
    except TypeError as error:
        wrong = f"{path}: {name} is not what `ncclep bench` writes, a list of {known}"
        raise InputError(f"{wrong}: give the bench.json of a run, unchanged") from error
