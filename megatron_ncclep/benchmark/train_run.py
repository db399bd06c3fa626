"""Training steps of one shape on one rank: check every subject, time all of them in turns."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.megatron_setup import excused, initialize
from megatron_ncclep.benchmark.progress import Show
from megatron_ncclep.benchmark.ranks import DeviceMemory, Ranks
from megatron_ncclep.benchmark.subjects import UnavailableError
from megatron_ncclep.benchmark.train_check import (
    bits_problem,
    curve_problem,
    layer_parts,
    most_apart,
)
from megatron_ncclep.benchmark.train_graphs import EAGER_STEPS
from megatron_ncclep.benchmark.train_model import Curve, SubjectModel, TrainingText, load_text
from megatron_ncclep.benchmark.train_names import CONTROL, parse_train, train_obstacle
from megatron_ncclep.benchmark.train_profile import StepProfile, profile_steps
from megatron_ncclep.benchmark.train_result import TrainingResult, TrainResult
from megatron_ncclep.benchmark.train_shapes import TrainingShape
from megatron_ncclep.benchmark.variants import Variant, dropped_problem
from megatron_ncclep.testing.launcher import RankContext
from megatron_ncclep.training.quiet import remarks_hidden

# Compared with the control's; with graphs the one after the eager ones captures, the rest replay.
CHECKED_STEPS = EAGER_STEPS + 3
CHECKED = (
    "weights, first MoE layer's output and gradient, losses and gradient norms of the first steps "
    "against alltoall"
)
CHECKED_BITS = f"{CHECKED}; with graphs against without, bit by bit"
# TransformerEngine reads it when a model is built: without it, backward of attention gives other
# bits in every run.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def run_training(
    context: RankContext, job: Job, shape: TrainingShape, notes: str | None, show: Show
) -> TrainingResult | None:
    """Measure every subject of the job that trains.  Collective; rank 0 gets the result.

    Args: see `run_shape` (run.py).
    """
    return _TrainingRun(context, job, shape, notes, show).run()


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


class _TrainingRun:
    """The state of `run_training`."""

    def __init__(
        self,
        context: RankContext,
        job: Job,
        shape: TrainingShape,
        notes: str | None,
        show: Show,
    ) -> None:
        self._job, self._shape = job, shape
        self._settings = shape.settings(context.num_ranks)
        self._ranks = Ranks(context, job.timeout_s, shape.name, notes, show)

    def run(self) -> TrainingResult | None:
        """See `run_training`."""
        try:
            with remarks_hidden():
                return self._run()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> TrainingResult | None:
        ranks, settings = self._ranks, self._settings
        entries = [
            _Entry(choice, TrainResult(choice.name, _checked(choice)))
            for choice in map(parse_train, self._job.trained)
        ]
        result = TrainingResult.of(self._shape)
        result.settings = settings.values
        result.tokens = settings["global-batch-size"] * settings["seq-length"]
        if any(entry.choice.static for entry in entries):
            result.max_recv_rows = self._job.max_recv_rows
        result.subjects = [entry.result for entry in entries]
        for entry in entries:
            if reason := train_obstacle(entry.choice, ranks.setting.device, self._shape):
                entry.result.fail("unavailable", reason)
        if able := [entry for entry in entries if entry.result.status == "ok"]:
            ranks.step("text")
            initialize(ranks.setting)
            text = load_text(settings, ranks, Path(self._job.out) / "data")
            result.text = text.source
            self._measure(able, text, result.tokens)
        ranks.close()
        result.judge(self._job.required)
        return result if ranks.rank == 0 else None

    def _measure(self, entries: list[_Entry], text: TrainingText, tokens: int) -> None:
        """Check and time subjects, and summarise them over the ranks.

        Args:
            entries: of the subjects.
            text: to train on.
            tokens: of all ranks in one step.
        """
        named = next((entry for entry in entries if entry.choice.name == CONTROL), None)
        control = None if named else self._control(text)
        for entry in entries:
            if entry.choice.captured and entry.choice.ours:
                self._check_bits(entry, text)
        # There and back: what drifts meets all subjects alike.
        for turn, order in enumerate((entries, entries[::-1])):
            for entry in order:
                if entry.result.status == "ok":
                    self._turn(entry, text, turn)
        control = control or _curve_of(named)
        for entry in entries:
            self._finish(entry, control, tokens)

    def _control(self, text: TrainingText) -> Curve:
        """Train the control for the first steps, where it is not measured itself.

        Raises:
            RuntimeError: it cannot be trained, and so nothing can be compared with it.
        """
        entry = _Entry(parse_train(CONTROL), TrainResult(CONTROL, ""))
        with self._model(entry, entry.choice, text, "control") as model:
            if model is not None:
                entry.curve = model.first_steps(CHECKED_STEPS, self._ranks.deadline)
        return _curve_of(entry)

    def _check_bits(self, entry: _Entry, text: TrainingText) -> None:
        """Compare a subject that has graphs with itself without them, bit by bit."""
        curves = []
        with mock.patch.dict(os.environ, DETERMINISTIC):
            for choice in (entry.choice.without_graphs(), entry.choice):
                with self._model(entry, choice, text, "bits") as model:
                    if model is not None:
                        curves.append(model.first_steps(CHECKED_STEPS, self._ranks.deadline))
                if entry.result.status != "ok":
                    return
        eager, graphed = curves
        self._judge(entry, bits_problem(graphed, eager))

    def _turn(self, entry: _Entry, text: TrainingText, turn: int) -> None:
        """Build a subject's model, check its first steps, time the next ones, and throw it away."""
        job, ranks, result = self._job, self._ranks, entry.result
        memory = DeviceMemory(ranks.on_gpu)
        with self._model(entry, entry.choice, text, f"turn {turn + 1}") as model:
            if model is None:
                return
            if entry.curve is None:
                entry.curve = model.first_steps(CHECKED_STEPS, ranks.deadline)
            for _ in range(job.warmup + (CHECKED_STEPS if turn else 0)):
                model.step()
                ranks.deadline()
            entry.times.append(ranks.timer.consecutive(model.step, job.samples))
            ranks.deadline()
            first, last = entry.curve.losses[0], model.loss
            if not last < first:  # a NaN is less than nothing
                entry.trouble = f"loss {last!r} after timing, and {first!r} in the first step"
            if dropped := dropped_problem(model.num_dropped, job.max_recv_rows):
                entry.trouble = dropped
            if turn == 0:
                result.memory = memory.growth()
                result.num_parameters = model.num_parameters
                if ranks.on_gpu:
                    entry.profile = profile_steps(model.phases)

    @contextmanager
    def _model(
        self, entry: _Entry, choice: Variant, text: TrainingText, what: str
    ) -> Iterator[SubjectModel | None]:
        """Give a subject's model to train with; what goes wrong is the subject's outcome."""
        self._ranks.step(choice.name, what)
        gc.collect()
        model: SubjectModel | None = None
        status, reason = "ok", None
        try:
            with excused(*choice.dispatcher.excuses):
                model = SubjectModel(
                    choice, self._settings, self._ranks.setting, text, self._job.max_recv_rows
                )
        except Exception as error:
            status, reason = _outcome(error)
        status, reason = self._ranks.agree(status, reason)
        if status == "ok":
            try:
                with excused(*(() if choice.ours else (Exception,))):
                    yield model
            except Exception as error:
                status, reason = _outcome(error)
            status, reason = self._ranks.agree(status, reason)
        else:
            yield None
        if model is not None:
            # Without the others an engine is not closed: that is collective.
            model.close(engines=status == "ok")
        if status != "ok":
            entry.result.fail(status, f"{what}: {reason}")

    def _finish(self, entry: _Entry, control: Curve, tokens: int) -> None:
        """Compare a subject with the control, and summarise it over the ranks.  Collective."""
        result, curve, ranks = entry.result, entry.curve, self._ranks
        if result.status != "ok":
            return
        assert curve is not None  # of the first turn
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


def _curve_of(control: _Entry | None) -> Curve:
    """The control's curve.

    Raises:
        RuntimeError: there is none.
    """
    assert control is not None
    if control.curve is None or control.result.status != "ok":
        raise RuntimeError(
            f"{CONTROL}, with which all are compared, {control.result.status}: "
            f"{control.result.reason}"
        )
    return control.curve


def _outcome(error: Exception) -> tuple[str, str]:
    """Status and reason of a subject that raised."""
    if isinstance(error, UnavailableError):
        return "unavailable", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def _checked(choice: Variant) -> str:
    return CHECKED_BITS if choice.captured and choice.ours else CHECKED
