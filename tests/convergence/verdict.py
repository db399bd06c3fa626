"""Judge what the arms have learnt; docs/convergence.md derives the rules.

An arm holds if it begins as the control does, drops nothing, and then

- has the bits of another arm, where the contract promises them, or else
- has learnt as much as the control: its effect on the validation loss, with the interval around it,
  stays within what two seeds of the control differ by.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from arms import CONTROL, Arm, Size

HOLDS, FAILS, NOT_SHOWN, MISSING = "holds", "FAILS", "not shown", "MISSING"
# Student's t: 95 % of it is below these, for 1, 2, ... degrees of freedom; the last stands for all
# larger numbers, and makes intervals a little too wide there.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
# Two results differ by less than this many of their standard deviations in 95 of 100 cases: the
# repeatability limit of ISO 5725-6.
REPEATABILITY = 1.96 * math.sqrt(2)


@dataclass
class Training:
    """What one arm logged with one seed, as far as it came.

    Attributes:
        arm, seed: which.
        settings: the log's first line.
        losses, grad_norms: of each step.
        seconds: (steps, seconds that they took), in order.
        validated: step -> validation loss.
        start: how it begins, against the control.
        end: the last line; None if it did not get there.
        failed: why not, if it said so.
    """

    arm: str
    seed: int
    settings: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    validated: dict[int, float] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    failed: str | None = None

    @property
    def learnt(self) -> float:
        """Mean validation loss of the second half, in nats a token: the statistic that decides."""
        return statistics.fmean(self.validated.values())

    @property
    def tokens_per_s(self) -> float:
        """Median over the lines of the log; the first has compiled and captured."""
        values = self.settings["settings"]
        tokens = values["global-batch-size"] * values["seq-length"]
        return statistics.median(
            tokens * steps / seconds for steps, seconds in self.seconds[1:] or self.seconds
        )

    def add(self, line: dict[str, Any]) -> None:
        """Take one line of the log in."""
        if line["type"] == "steps":
            self.losses += line["loss"]
            self.grad_norms += line["grad_norm"]
            self.seconds.append((len(line["loss"]), line["seconds"]))
        elif line["type"] == "valid":
            self.validated[line["step"]] = line["loss"]
        elif line["type"] == "start":
            self.start = line
        elif line["type"] == "end":
            self.end = line


def read(folder: Path) -> list[Training]:
    """The trainings in the logs of `folder`; of one that was begun twice, the last."""
    found: dict[tuple[str, int], Training] = {}
    for path in sorted(folder.glob("lane-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not text.endswith("\n"):
                break  # the process was ended while it wrote
            line = json.loads(text)
            key = line["arm"], line["seed"]
            if line["type"] == "settings" or key not in found:
                found[key] = Training(*key, settings=line)
            if line["type"] == "failed":
                found[key].failed = line["reason"]
            found[key].add(line)
    return list(found.values())


@dataclass(frozen=True)
class Effect:
    """What an arm does to the statistic, against the control of the same seeds.

    Attributes:
        nats: estimate.
        half_width: of the two-sided 90 % interval around it.
    """

    nats: float
    half_width: float


@dataclass(frozen=True)
class Spread:
    """What seeds and roundings do to the statistic.

    Attributes:
        margin: what the difference of two seeds of the control stays below in 95 of 100 cases, in
            nats.
        noise: standard deviation of what neither the seed nor the arm explains, in nats.
        degrees: of freedom of `noise`.
    """

    margin: float
    noise: float
    degrees: int


@dataclass(frozen=True)
class ArmVerdict:
    """What is known of one arm.

    Attributes:
        arm: which.
        trainings: that came to an end.
        status: `HOLDS`, ...
        reason: why, in words.
        effect: None for the control, where bits decide, and without a noise to compare with.
    """

    arm: Arm
    trainings: list[Training]
    status: str
    reason: str
    effect: Effect | None = None

    @property
    def is_as_wanted(self) -> bool:
        """Whether it holds; of an arm with a mistake, whether it is rejected."""
        if self.arm.mistake is None:
            return self.status == HOLDS
        return self.status in (FAILS, NOT_SHOWN)


@dataclass(frozen=True)
class Verdict:
    """The whole.

    Attributes:
        size: of the protocol.
        trainings: all, those that did not come to an end too.
        arms: in the size's order.
        spread: None if there are too few trainings for it.
        not_run: runs without a complete training, in words.
    """

    size: Size
    trainings: list[Training]
    arms: list[ArmVerdict]
    spread: Spread | None
    not_run: list[str]

    @property
    def holds(self) -> bool:
        """Whether every arm holds and every mistake is rejected."""
        return all(arm.is_as_wanted for arm in self.arms)


def compare(values: dict[tuple[str, int], float]) -> tuple[Spread, dict[str, Effect]]:
    """Estimate every arm's effect, the seeds being blocks of a randomised block design.

    value(arm, seed) = value of the seed + effect of the arm + noise, by least squares: arms of
    which some seeds are missing serve as far as they go.

    Args:
        values: (arm, seed) -> statistic.

    Raises:
        ValueError: the control has fewer than two seeds, or no arm beside it has more than one, so
            that there is nothing to tell noise by.
    """
    controls = {seed: value for (arm, seed), value in values.items() if arm == CONTROL}
    if len(controls) < 2:
        raise ValueError(f"{CONTROL} has {len(controls)} seeds, of which two are needed at least")
    # A seed without a control says nothing about the distance to it.
    cells = [(arm, seed) for arm, seed in values if seed in controls]
    arms = sorted({arm for arm, _ in cells} - {CONTROL})
    seeds = sorted(controls)
    degrees = len(cells) - len(seeds) - len(arms)
    if degrees < 1:
        raise ValueError(f"no arm beside {CONTROL} has two seeds, by which the noise is known")
    design = np.array(
        [[*(seed == s for s in seeds), *(arm == a for a in arms)] for arm, seed in cells], float
    )
    found = np.array([values[cell] for cell in cells])
    inverse = np.linalg.inv(design.T @ design)
    solution = inverse @ design.T @ found
    noise = math.sqrt(float(((found - design @ solution) ** 2).sum()) / degrees)
    quantile = T_95[min(degrees, len(T_95)) - 1]
    effects = {
        arm: Effect(float(solution[i]), quantile * noise * math.sqrt(inverse[i, i]))
        for i, arm in enumerate(arms, start=len(seeds))
    }
    margin = REPEATABILITY * statistics.stdev(controls.values())
    return Spread(margin, noise, degrees), effects


def judge(size: Size, trainings: list[Training]) -> Verdict:
    """Apply the rules to what was trained."""
    complete = {(t.arm, t.seed): t for t in trainings if t.end is not None and t.failed is None}
    decided_by_bits = {arm.name for arm in size.arms if arm.same_bits_as is not None}
    values = {
        key: t.learnt
        for key, t in complete.items()
        if key[0] not in decided_by_bits and math.isfinite(t.learnt)
    }
    spread, effects, problem_of_noise = None, dict[str, Effect](), ""
    try:
        spread, effects = compare(values)
    except ValueError as error:
        problem_of_noise = str(error)
    arms = []
    for arm in size.arms:
        own = [t for (name, _), t in complete.items() if name == arm.name]
        failed = [t for t in trainings if t.arm == arm.name and t.failed is not None]
        effect = effects.get(arm.name)
        status, reason = _judge_arm(arm, own, failed, complete, effect, spread, problem_of_noise)
        arms.append(ArmVerdict(arm, own, status, reason, effect))
    not_run = [_not_run(arm, seed, trainings) for arm, seed in size.runs]
    return Verdict(size, trainings, arms, spread, [text for text in not_run if text])


def _judge_arm(
    arm: Arm,
    own: list[Training],
    failed: list[Training],
    complete: dict[tuple[str, int], Training],
    effect: Effect | None,
    spread: Spread | None,
    problem_of_noise: str,
) -> tuple[str, str]:
    if failed and arm.mistake is None:
        return FAILS, f"seed {failed[0].seed} ended with an error"
    if not own:
        return MISSING, "no training came to an end"
    for training in own:
        if not all(map(math.isfinite, [*training.losses, training.learnt])):
            return FAILS, f"seed {training.seed}: a loss is not finite"
        if training.end and training.end["dropped"]:
            return FAILS, f"seed {training.seed}: {training.end['dropped']} rows were dropped"
        if training.start.get("problem"):
            return (
                FAILS,
                f"seed {training.seed}, before the first step: {training.start['problem']}",
            )
    if arm.name == CONTROL:
        return _judge_control(own)
    if arm.same_bits_as is not None:
        return _judge_bits(arm.same_bits_as, own, complete)
    if spread is None or effect is None:
        return NOT_SHOWN, problem_of_noise
    reach = abs(effect.nats) + effect.half_width
    told = f"{effect.nats:+.5f} ± {effect.half_width:.5f} nats, ± {spread.margin:.5f} allowed"
    if reach < spread.margin:
        return HOLDS, told
    return (FAILS if abs(effect.nats) >= spread.margin else NOT_SHOWN), told


def _judge_control(own: list[Training]) -> tuple[str, str]:
    """Where nothing is learnt, nothing can be learnt wrongly."""
    for training in own:
        last, entropy = training.validated[max(training.validated)], training.settings["entropy"]
        if not last < entropy:
            return FAILS, (
                f"seed {training.seed} has not learnt: validation loss {last:.4f}, and the "
                f"letters' frequencies alone give {entropy:.4f}"
            )
    return HOLDS, f"{len(own)} seeds"


def _judge_bits(
    other: str, own: Iterable[Training], complete: dict[tuple[str, int], Training]
) -> tuple[str, str]:
    """Compare losses, gradient norms and validation losses of the seeds that both have."""
    shared = [(t, complete[other, t.seed]) for t in own if (other, t.seed) in complete]
    if not shared:
        return NOT_SHOWN, f"{other} was not trained with the same seed"
    for mine, theirs in shared:
        for what, a, b in (
            ("loss", mine.losses, theirs.losses),
            ("gradient norm", mine.grad_norms, theirs.grad_norms),
        ):
            differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True), start=1) if x != y]
            if differ:
                step = differ[0]
                return FAILS, (
                    f"seed {mine.seed}, step {step}: {what} {a[step - 1]!r}, and "
                    f"{b[step - 1]!r} of {other}, which must be the same bits"
                )
        if mine.validated != theirs.validated:
            return FAILS, f"seed {mine.seed}: other validation losses than {other}"
    steps = sum(len(mine.losses) for mine, _ in shared)
    return HOLDS, f"{steps} steps with the bits of {other}"


def _not_run(arm: str, seed: int, trainings: list[Training]) -> str | None:
    """Say why there is no complete training; None if there is."""
    found = next((t for t in trainings if (t.arm, t.seed) == (arm, seed)), None)
    if found is None:
        return f"{arm}, seed {seed}: not begun"
    if found.failed is not None:
        lines = found.failed.splitlines() or [""]
        return f"{arm}, seed {seed}: {len(found.losses)} steps, then: {lines[-1]}"
    if found.end is None:
        return f"{arm}, seed {seed}: cut off after {len(found.losses)} steps"
    return None
