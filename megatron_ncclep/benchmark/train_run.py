"""Training steps of one shape on one rank: check every subject, time all of them in turns."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.megatron_setup import initialize
from megatron_ncclep.benchmark.names import (
    CONTROL,
    TRAININGS,
    Variant,
    dropped_problem,
    unavailable_reason,
)
from megatron_ncclep.benchmark.ranks import DeviceMemory, Ranks
from megatron_ncclep.benchmark.result import TrainingResult, TrainResult
from megatron_ncclep.benchmark.shapes import TrainingShape
from megatron_ncclep.benchmark.subjects import excused
from megatron_ncclep.benchmark.train_check import (
    bits_problem,
    curve_problem,
    layer_parts,
    most_apart,
)
from megatron_ncclep.benchmark.train_graphs import EAGER_STEPS
from megatron_ncclep.benchmark.train_model import Curve, SubjectModel, TrainingText, load_text
from megatron_ncclep.benchmark.train_profile import StepProfile, profile_steps

# Compared with the control's; with graphs the one after the eager ones captures, the rest replay.
CHECKED_STEPS = EAGER_STEPS + 3
# TransformerEngine reads it when a model is built: without it, backward of attention gives other
# bits in every run.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@dataclass
class _Entry:
    """A subject that is being measured, and what is known of it."""

    choice: Variant
    result: TrainResult
    curve: Curve | None = None
    # What timed steps of this rank say against it.
    trouble: str | None = None
    # Of this rank, one list for each turn.
    times: list[list[float]] = field(default_factory=list)
    profile: StepProfile | None = None
    # Of the model, the same for all subjects.
    fused_by: str | None = None


class TrainingRun:
    """Measures every subject of a job that trains, on one rank; all ranks together.

    Args:
        ranks: of the measurement.
        job, shape: the same on every rank.
    """

    def __init__(self, ranks: Ranks, job: Job, shape: TrainingShape) -> None:
        self._ranks, self._job, self._shape = ranks, job, shape
        self._settings = shape.settings(ranks.num_ranks)

    def run(self) -> TrainingResult:
        """Measure them.  Collective."""
        ranks, settings = self._ranks, self._settings
        entries = [
            _Entry(choice, TrainResult(choice.name))
            for choice in map(TRAININGS.parse, self._job.trained)
        ]
        result: TrainingResult = TrainingResult.of(self._shape)
        result.settings = settings.values
        result.tokens = settings["global-batch-size"] * settings["seq-length"]
        if any(entry.choice.static for entry in entries):
            result.max_recv_rows = self._job.max_recv_rows
        result.subjects = [entry.result for entry in entries]
        for entry in entries:
            if reason := unavailable_reason(entry.choice, ranks.setting.device, self._shape):
                entry.result.fail("unavailable", reason)
        if able := [entry for entry in entries if entry.result.status == "ok"]:
            ranks.step("text")
            initialize(ranks.setting)
            text = load_text(settings, ranks, Path(self._job.out) / "data")
            result.text = text.source
            self._measure(able, text, result)
        return result

    def _measure(self, entries: list[_Entry], text: TrainingText, result: TrainingResult) -> None:
        """Check and time subjects, and summarise them over the ranks.

        Args:
            entries: of the subjects.
            text: to train on.
            result: of all of them.
        """
        control = next((entry for entry in entries if entry.choice.name == CONTROL), None)
        if control is None:  # all are compared with it, measured or not
            control = _Entry(TRAININGS.parse(CONTROL), TrainResult(CONTROL))
            self._with_model(control, control.choice, text, "control", self._first_steps)
            _curve_of(control)
        for entry in entries:
            if entry.choice.captured and entry.choice.ours:
                self._check_bits(entry, text)
        # There and back: what drifts meets all subjects alike.
        for turn, order in enumerate((entries, entries[::-1])):
            for entry in order:
                if entry.result.status == "ok":
                    self._turn(entry, text, turn)
        curve = _curve_of(control)
        result.fused_by = control.fused_by
        for entry in entries:
            self._finish(entry, curve, result.tokens)

    def _check_bits(self, entry: _Entry, text: TrainingText) -> None:
        """Compare a subject that has graphs with itself without them, bit by bit."""
        curves = []
        with mock.patch.dict(os.environ, DETERMINISTIC):
            for choice in (entry.choice.without_graphs(), entry.choice):
                self._with_model(entry, choice, text, "bits", self._first_steps)
                if entry.result.status != "ok":
                    return
                curves.append(entry.curve)
        eager, graphed = map(_known, curves)
        entry.curve = None  # of a run with other settings than the one that is timed
        self._judge(entry, bits_problem(graphed, eager))

    def _turn(self, entry: _Entry, text: TrainingText, turn: int) -> None:
        """Build a subject's model, check its first steps, time the next ones, and throw it away."""
        job, ranks, result = self._job, self._ranks, entry.result
        memory = DeviceMemory(ranks.on_gpu)

        def train(entry: _Entry, model: SubjectModel) -> None:
            if entry.curve is None:
                self._first_steps(entry, model)
            for _ in range(job.warmup + (CHECKED_STEPS if turn else 0)):
                model.step()
                ranks.deadline()
            entry.times.append(ranks.timer.consecutive(model.step, job.samples))
            ranks.deadline()
            first, last = _known(entry.curve).losses[0], model.loss
            if not last < first:  # a NaN is less than nothing
                entry.trouble = f"loss {last!r} after timing, and {first!r} in the first step"
            if dropped := dropped_problem(model.num_dropped, job.max_recv_rows):
                entry.trouble = dropped
            if turn == 0:
                result.memory = memory.growth()
                result.num_parameters = model.num_parameters
                if ranks.on_gpu:
                    entry.profile = profile_steps(model.phases)

        self._with_model(entry, entry.choice, text, f"turn {turn + 1}", train)

    def _first_steps(self, entry: _Entry, model: SubjectModel) -> None:
        entry.curve = model.first_steps(CHECKED_STEPS, self._ranks.deadline)

    def _with_model(
        self,
        entry: _Entry,
        choice: Variant,
        text: TrainingText,
        what: str,
        train: Callable[[_Entry, SubjectModel], None],
    ) -> None:
        """Make a subject's model and train it; what goes wrong is the subject's outcome."""
        self._ranks.step(f"{choice.name}, {what}")
        gc.collect()
        models: list[SubjectModel] = []
        setting, max_recv_rows = self._ranks.setting, self._job.max_recv_rows

        def make() -> None:
            with excused(*choice.dispatcher.excuses):
                models.append(SubjectModel(choice, self._settings, setting, text, max_recv_rows))
            entry.fused_by = models[0].fused_by

        def use() -> None:
            with excused(*(() if choice.ours else (Exception,))):
                train(entry, models[0])

        status, reason = self._ranks.attempt(make)
        if status == "ok":
            status, reason = self._ranks.attempt(use)
        for model in models:
            # Without the others an engine is not closed: that is collective.
            model.close(engines=status == "ok")
        if status != "ok":
            entry.result.fail(status, f"{what}: {reason}")

    def _finish(self, entry: _Entry, control: Curve, tokens: int) -> None:
        """Compare a subject with the control, and summarise it over the ranks.  Collective."""
        result, ranks = entry.result, self._ranks
        if result.status != "ok":
            return
        curve = _known(entry.curve)
        apart = most_apart(curve, control), max(layer_parts(curve, control).values())
        losses, losses_apart, layers_apart = zip(*ranks.gather((curve.losses, *apart)), strict=True)
        result.losses = [sum(step) / len(step) for step in zip(*losses, strict=True)]
        result.loss_apart, result.layer_apart = max(losses_apart), max(layers_apart)
        turns = [
            [max(samples) for samples in zip(*turn, strict=True)]
            for turn in zip(*ranks.gather(entry.times), strict=True)
        ]
        result.set_samples(turns, tokens)
        result.memory = ranks.largest(result.memory)
        profiles = ranks.gather(entry.profile)
        if entry.profile is not None:
            result.kinds_us = {
                kind: sum(profile.kinds_us[kind] for profile in profiles) / len(profiles)
                for kind in entry.profile.kinds_us
            }
            result.host_us = max(profile.host_us for profile in profiles)
        problem = curve_problem(curve, control, self._settings["moe-router-topk"])
        self._judge(entry, entry.trouble or problem)

    def _judge(self, entry: _Entry, problem: str | None) -> None:
        """Take a problem of any rank as the subject's outcome.  Collective."""
        mine = f"rank {self._ranks.rank}: {problem}" if problem else None
        status, reason = self._ranks.agree("wrong" if problem else "ok", mine)
        if status != "ok":
            entry.result.fail(status, reason)


def _curve_of(control: _Entry) -> Curve:
    """The control's curve.

    Raises:
        RuntimeError: there is none.
    """
    if control.curve is None or control.result.status != "ok":
        raise RuntimeError(
            f"{CONTROL}, with which all are compared, {control.result.status}: "
            f"{control.result.reason}"
        )
    return control.curve


def _known(curve: Curve | None) -> Curve:
    assert curve is not None  # a subject whose first steps failed is not ok
    return curve
