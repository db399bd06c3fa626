"""Results of training steps: what bench.json holds of them, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ncclep.benchmark.timing import Spread
from megatron_ncclep.benchmark.train_shapes import TrainingShape

HOW = (
    "Every subject is built, trained and thrown away in turn, first in the order of the table and "
    "then in the reverse order, and the samples of both turns count: models that stay would take "
    "18 bytes a parameter each. A step is zeroing the gradients, forward, backward, gradient "
    "reduction and Adam; the batches lie on the device. bf16 weights, gradients in fp32, Adam's "
    "moments and weights in fp32, in the distributed optimizer; Megatron-LM's fusions as it has "
    "them by default, gradient accumulation fusion where Apex is installed. Steps follow each "
    "other without a pause."
)


@dataclass
class TrainResult:
    """What is known of one subject that trains, with one shape.

    Attributes:
        name: of the subject.
        checked: what was compared, in words.
        status, reason: as of a SubjectResult.
        step: {"median_us", "p10_us", "p90_us"} of the slowest rank.
        turns_us: the median of each turn.
        tokens_per_s: of all ranks, at the median.
        losses: mean over the ranks, of each of the first steps.
        loss_apart: largest difference of these from the control's, on any rank, in nats.
        layer_apart: likewise of the first MoE layer's output or gradient, relative to its size.
        kinds_us: kind of kernel -> its share of the device's busy time in a step, the mean over the
            ranks; empty without a profile.
        host_us: time that a step's host does not wait for its device, on the slowest rank.
        memory: bytes on the rank that takes most, {"torch_bytes", "other_bytes"}; None on a CPU.
        num_parameters: of one rank.
    """

    name: str
    checked: str
    status: str = "ok"
    reason: str | None = None
    step: dict[str, float] = field(default_factory=dict)
    turns_us: list[float] = field(default_factory=list)
    tokens_per_s: float | None = None
    losses: list[float] = field(default_factory=list)
    loss_apart: float | None = None
    layer_apart: float | None = None
    kinds_us: dict[str, float] = field(default_factory=dict)
    host_us: float | None = None
    memory: dict[str, int] | None = None
    num_parameters: int | None = None

    def set_samples(self, turns: Sequence[Sequence[float]], tokens: int) -> None:
        """Summarise the slowest rank's microseconds of every step, by turn.

        Args:
            turns: at least one, each of at least one sample.
            tokens: of all ranks in one step.
        """
        spread = Spread.of([sample for turn in turns for sample in turn])
        self.step = {"median_us": spread.median, "p10_us": spread.p10, "p90_us": spread.p90}
        self.turns_us = [Spread.of(turn).median for turn in turns]
        self.tokens_per_s = tokens / spread.median * 1e6

    def fail(self, status: str, reason: str | None) -> None:
        """Take what is no good out of the result."""
        self.status, self.reason = status, reason
        self.step, self.turns_us, self.tokens_per_s, self.kinds_us = {}, [], None, {}


@dataclass
class TrainingResult:
    """What was measured with one model and batch.

    Attributes:
        shape: the fields of TrainingShape.
        settings: the model's arguments.
        tokens: of all ranks in one step.
        text: what was trained on, in words.
        max_recv_rows: option of static subjects.
        subjects: in the order in which they are shown.
        how: what a step is and how it was measured, in words.
        error: why nothing was measured, if so.
        failures: everything because of which the command fails, in words.
    """

    shape: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    text: str = ""
    max_recv_rows: int | str | None = None
    subjects: list[TrainResult] = field(default_factory=list)
    how: str = HOW
    error: str | None = None
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, shape: TrainingShape, error: str | None = None) -> TrainingResult:
        """Start the result of a shape."""
        return cls(dataclasses.asdict(shape), error=error)

    def judge(self, required: Sequence[str]) -> None:
        """Work out what is a failure.

        Args:
            required: names of subjects that must have run.
        """
        where = self.shape["name"]
        if self.error is not None:
            self.failures.append(f"{where}: nothing was measured: {self.error}")
        self.failures += failures(where, self.subjects, required)


def failures(where: str, subjects: Sequence[Any], required: Sequence[str]) -> list[str]:
    """What went wrong with `subjects`, in words; what cannot run only if it is required."""
    found = []
    for subject in subjects:
        if subject.status in ("wrong", "failed"):
            found.append(f"{where}: {subject.name} {subject.status}: {subject.reason}")
        elif subject.status == "unavailable" and subject.name in required:
            found.append(f"{where}: {subject.name} was asked for and cannot run: {subject.reason}")
    return found
