"""Training steps of one shape on one rank: check every subject, time all of them in turns.

The first steps of each, from the same weights on the same batches, are compared with those of
Megatron-Core's `alltoall`:

- the initial weights: equal;
- the first MoE layer's output and gradient, for given hidden states and a given gradient of the
  output.  Only roundings differ there: n independent ones, each of at most half a spacing of its
  value, differ by sqrt(n) halves of a spacing.  A thousandth of the rows at a wrong expert would
  make four hundredths, three times the bound for bf16 with eight experts per token;
- the losses and gradient norms.  In fp32 they differ by the order of a sum only (see
  docs/convergence.md).  In bf16, roundings decide a tenth of the routers' choices, between nearly
  equal experts; from there on two curves are two draws of one experiment with close means.

A replayed CUDA graph must give the bits of the same subject without graphs.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch

from benchmarks import catalogue
from benchmarks.catalogue import CONTROL, FP8, Variant, known_variant
from benchmarks.layer_model import initialize
from benchmarks.profiles import profile_steps, trace_path, trace_step
from benchmarks.result import TrainingResult, TrainResult
from benchmarks.shapes import BALANCED, TrainingShape
from benchmarks.training_model import (
    EAGER_STEPS,
    NUM_BATCHES,
    Curve,
    SubjectModel,
    Text,
    load_text,
)
from megatron_ncclep.benchmark import excused
from megatron_ncclep.benchmark.ranks import DeviceMemory, Ranks

if TYPE_CHECKING:
    from benchmarks.job import Job

# Compared with the control's; with graphs the one after the eager ones captures, the rest replay.
CHECKED_STEPS = EAGER_STEPS + 3
# TransformerEngine reads it when a model is built: otherwise the bits of attention's backward vary.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Roundings of rows on their way through a layer, apart from the sum over a token's experts: two
# products of an expert, its activation, the result, and in backward what comes from the router.
ROUNDINGS = 6
# Micro-batches of a step of those that the shape's `trained_steps` take: the router learns from
# fewer, too, and these steps are timed by nobody.
START_MICROBATCHES = 2
# How much losses and gradient norms may differ, relative to the value: fp32 by docs/convergence.md,
# nats near 5.  A norm adds up squares of gradients, which differ by more.
MOST_APART = {torch.float32: (2e-6, 1e-4), torch.bfloat16: (5e-3, 5e-2)}


@dataclass
class _Entry:
    """A subject that is being measured, and its results on this rank so far."""

    choice: Variant
    result: TrainResult
    curve: Curve | None = None
    trouble: str | None = None  # a problem found in timed steps
    times: list[list[float]] = field(default_factory=list)  # one list for each turn
    profile: tuple[dict[str, float], float] | None = None  # see `profile_steps`
    fused_by: str | None = None  # of the model, the same for all subjects


class TrainingRun:
    """Measures every subject of a job that trains, on one rank.  Collective."""

    def __init__(self, ranks: Ranks, job: Job, shape: TrainingShape) -> None:
        self._ranks, self._job, self._shape = ranks, job, shape
        self._settings = shape.settings(ranks.num_ranks)
        # After the shape's `trained_steps`, if any: what subjects begin with, and the loss before.
        self._start: dict[str, torch.Tensor] | None = None
        self._first_loss = 0.0

    def run(self) -> TrainingResult:
        """Measure them.  Collective."""
        ranks, settings, device = self._ranks, self._settings, self._ranks.setting.device
        entries = [_Entry(known_variant(name), TrainResult(name)) for name in self._job.trained]
        result: TrainingResult = TrainingResult.of(self._shape)
        result.settings = settings.values
        result.tokens = settings["global-batch-size"] * settings["seq-length"]
        if any(entry.choice.static for entry in entries):
            result.max_recv_rows = self._job.max_recv_rows
        result.subjects = [entry.result for entry in entries]
        for entry in entries:
            if reason := catalogue.unavailable_reason(entry.choice, device, self._shape):
                entry.result.fail("unavailable", reason)
        if able := [entry for entry in entries if entry.result.status == "ok"]:
            ranks.step("text")
            initialize(ranks.setting)
            text = load_text(
                settings, ranks, Path(self._job.out) / "data",
                NUM_BATCHES + self._shape.trained_steps, self._shape.vocab_size,
            )  # fmt: skip
            result.text, result.vocab_size = text.source, text.vocab_size
            self._measure(able, text, result)
        return result

    def _measure(self, entries: list[_Entry], text: Text, result: TrainingResult) -> None:
        """Check and time subjects, and summarise them over the ranks."""
        if steps := self._shape.trained_steps:
            self._train_start(text)
            text = dataclasses.replace(text, steps=text.steps[steps:])  # the others are not new
        # All are compared with one of the same precision, measured or not.
        controls = {
            in_fp8: self._control(entries, f"{CONTROL}:{FP8}" if in_fp8 else CONTROL, text)
            for in_fp8 in sorted({entry.choice.fp8 for entry in entries})
        }
        for entry in entries:
            if entry.choice.captured and entry.choice.ours:
                self._check_bits(entry, text)
        # There and back: drift affects all subjects alike.
        for turn, order in enumerate((entries, entries[::-1])):
            for entry in order:
                if entry.result.status == "ok":
                    self._turn(entry, text, turn)
        curves = {in_fp8: _curve_of(control) for in_fp8, control in controls.items()}
        first = next(iter(controls))
        result.fused_by, result.load = controls[first].fused_by, curves[first].load
        for entry in entries:
            if entry.result.status == "ok":
                self._finish(entry, curves[entry.choice.fp8], result.tokens)

    def _control(self, entries: list[_Entry], name: str, text: Text) -> _Entry:
        """The subject with which others are compared, trained here if it is not among them."""
        found = next((entry for entry in entries if entry.choice.name == name), None)
        if found is None:
            found = _Entry(known_variant(name), TrainResult(name))
            self._train(found, found.choice, text, "control")
            _curve_of(found)
        return found

    def _train_start(self, text: Text) -> None:
        """Train the control, and keep its weights, on the CPU, for all subjects to begin with."""
        steps, values = self._shape.trained_steps, {}

        def train(model: SubjectModel) -> None:
            for _ in range(steps - CHECKED_STEPS):
                model.step()
                self._ranks.deadline()
            values.update({name: value.cpu().clone() for name, value in model.values().items()})

        first = _Entry(known_variant(CONTROL), TrainResult(CONTROL))
        few = dataclasses.replace(text, steps=[step[:START_MICROBATCHES] for step in text.steps])
        with mock.patch.dict(os.environ, DETERMINISTIC):
            self._train(first, first.choice, few, f"{steps} steps before all others", train)
        self._first_loss, self._start = _curve_of(first).losses[0], values

    def _check_bits(self, entry: _Entry, text: Text) -> None:
        """Compare a subject that has graphs with itself without them, bit by bit."""
        curves = []
        with mock.patch.dict(os.environ, DETERMINISTIC):
            for choice in (entry.choice.without_graphs(), entry.choice):
                self._train(entry, choice, text, "bits")
                if entry.result.status != "ok":
                    return
                curves.append(_curve_of(entry))
                entry.curve = None  # of a run with other settings than the one that is timed
        eager, graphed = curves
        self._judge(entry, bits_problem(graphed, eager))

    def _turn(self, entry: _Entry, text: Text, turn: int) -> None:
        """Build a subject's model, check its first steps, time the next ones, and discard it."""
        asked, ranks, result = self._job, self._ranks, entry.result
        memory = DeviceMemory(ranks.on_gpu)

        def measure(model: SubjectModel) -> None:
            for _ in range(asked.warmup + (CHECKED_STEPS if turn else 0)):
                model.step()
                ranks.deadline()
            entry.times.append(ranks.timer.consecutive(model.step, asked.samples))
            ranks.deadline()
            first, last = _curve_of(entry).losses[0], float(model.loss)
            if self._start is not None:  # later losses differ more from batch to batch
                first = self._first_loss
            if not last < first:  # also true of a NaN
                entry.trouble = f"loss {last!r} after timing, and {first!r} in the first step"
            if dropped := catalogue.dropped_problem(model.num_dropped, asked.max_recv_rows):
                entry.trouble = dropped
            if turn == 0:
                result.memory = memory.growth()
                result.num_parameters = sum(weight.numel() for weight in model.gpt.parameters())
                if ranks.on_gpu:
                    entry.profile = profile_steps(model.phases)
                if asked.trace:
                    path = trace_path(
                        Path(asked.out), f"{self._shape.name} {result.name}", ranks.rank
                    )
                    ranks.gather(None)  # so that all begin together
                    trace_step(model.phases, path)

        self._train(entry, entry.choice, text, f"turn {turn + 1}", measure)

    def _train(
        self, entry: _Entry, choice: Variant, text: Text, what: str,
        then: Callable[[SubjectModel], None] = lambda model: None,
    ) -> None:  # fmt: skip
        """Make a model, train its first steps unless their curve is known, and then `then`.

        A failure becomes the subject's outcome.
        """
        self._ranks.step(f"{choice.name}, {what}")
        gc.collect()
        models: list[SubjectModel] = []
        setting, max_recv_rows = self._ranks.setting, self._job.max_recv_rows

        def make() -> None:
            with excused(*choice.dispatcher.excuses):
                made = SubjectModel(
                    choice, self._settings, setting, text, max_recv_rows,
                    self._shape.routing == BALANCED, self._start,
                )  # fmt: skip
                models.append(made)
            entry.fused_by = models[0].fused_by

        def use() -> None:
            with excused(*(() if choice.ours else (Exception,))):
                if entry.curve is None:
                    entry.curve = models[0].first_steps(CHECKED_STEPS, self._ranks.deadline)
                then(models[0])

        status, reason = self._ranks.attempt(make)
        if status == "ok":
            status, reason = self._ranks.attempt(use)
        for model in models:
            # Closing an engine is collective: not after a failure of one rank.
            model.close(engines=status == "ok")
        if status != "ok":
            entry.result.fail(status, f"{what}: {reason}")
            self._ranks.step(f"{entry.result.name} is left out: {status}: {reason}")

    def _finish(self, entry: _Entry, control: Curve, tokens: int) -> None:
        """Compare a subject with the control, and summarise it over the ranks.  Collective."""
        result, ranks, curve = entry.result, self._ranks, _curve_of(entry)
        apart = (
            max(abs(a - b) for a, b in zip(curve.losses, control.losses, strict=True)),
            max(layer_parts(curve, control).values()),
        )
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
            kinds, hosts = zip(*profiles, strict=True)
            result.kinds_us = {kind: sum(k[kind] for k in kinds) / len(kinds) for kind in kinds[0]}
            result.host_us = max(hosts)
        problem = curve_problem(curve, control, self._settings["moe-router-topk"])
        self._judge(entry, entry.trouble or problem)

    def _judge(self, entry: _Entry, problem: str | None) -> None:
        """Make a problem of any rank the subject's outcome.  Collective."""
        mine = f"rank {self._ranks.rank}: {problem}" if problem else None
        status, reason = self._ranks.attempt(lambda: mine)
        if status != "ok":
            entry.result.fail(status, reason)


def _curve_of(entry: _Entry) -> Curve:
    """The curve of a subject that must have one, such as the control."""
    if entry.curve is None or entry.result.status != "ok":
        who = f"{entry.choice.name}, with which others are compared"
        raise RuntimeError(f"{who}, {entry.result.status}: {entry.result.reason}")
    return entry.curve


def curve_problem(curve: Curve, control: Curve, top_k: int) -> str | None:
    """Say where a training departs from the control, if it does."""
    if problem := _weights_problem(curve, control):
        return problem
    output = control.output
    # Roundings of rows, and of inner products over the hidden size and an expert's, in fp32.
    allowed = math.sqrt(top_k + ROUNDINGS) * torch.finfo(output.dtype).eps / 2
    allowed += math.sqrt(2 * output.shape[-1]) * torch.finfo(torch.float32).eps / 2
    for what, part in layer_parts(curve, control).items():
        if not part <= allowed:  # also true of a NaN
            said = f"the {what} of the first MoE layer is {part:.2g} of its size away"
            return f"{said} from alltoall's, {allowed:.2g} is allowed"
    return _steps_problem(curve, control, "alltoall's", MOST_APART[output.dtype])


def bits_problem(graphed: Curve, eager: Curve) -> str | None:
    """Say where a training with graphs differs in any bit from the one without, if it does."""
    problem = _weights_problem(graphed, eager)
    return problem or _steps_problem(graphed, eager, "without graphs it", (0.0, 0.0))


def layer_parts(curve: Curve, control: Curve) -> dict[str, float]:
    """How much output and gradient of the first MoE layer differ, relative to their size."""
    pairs = {
        "output": (curve.output.double(), control.output.double()),
        "gradient": (curve.gradient.double(), control.gradient.double()),
    }
    return {what: float((a - b).norm() / b.norm()) for what, (a, b) in pairs.items()}


def _steps_problem(
    curve: Curve, other: Curve, whose: str, bounds: tuple[float, float]
) -> str | None:
    """Say in which step a loss or a gradient norm is too far from the other's."""
    for what, mine, theirs, bound in (
        ("loss", curve.losses, other.losses, bounds[0]),
        ("gradient norm", curve.grad_norms, other.grad_norms, bounds[1]),
    ):
        for step, (value, wanted) in enumerate(zip(mine, theirs, strict=True), start=1):
            most = bound * abs(wanted)
            if not abs(value - wanted) <= most:  # also true of a NaN
                said = f"step {step}: {what} {value!r}, {whose} is {wanted!r}"
                return f"{said}, and they may differ by {most:.2g}"
    return None


def _weights_problem(curve: Curve, other: Curve) -> str | None:
    if differ := sorted(curve.weights.keys() ^ other.weights.keys()):
        return f"other parameters than in the other run: {differ[0]} and {len(differ) - 1} more"
    for name, sums in curve.weights.items():
        if sums != other.weights[name]:
            return f"{name} starts from other values than in the other run"
    return None
