"""Judge what the arms have learnt; docs/convergence.md derives the rules.

An arm holds if it begins as the control does, drops nothing, and then

- has the bits of another arm, where the contract promises them, or else
- has learnt as much as the control: its effect on the validation loss, with the interval around it,
  stays within what two seeds of the control differ by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from arm_log import Training, first_difference
from arms import CONTROL, Arm, Size
from equivalence import Effect, Spread, compare

HOLDS, FAILS, NOT_SHOWN, MISSING = "holds", "FAILS", "not shown", "MISSING"
NO_EFFECT = Effect(0.0, 0.0)


@dataclass(frozen=True)
class ArmVerdict:
    """What is known of one arm.

    Attributes:
        arm: which.
        trainings: that came to an end.
        status: `HOLDS`, ...
        reason: why, in words.
        effect: None for the control, and where there are too few trainings to tell.
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


def judge(size: Size, trainings: list[Training]) -> Verdict:
    """Apply the rules to what was trained."""
    complete = {(t.arm, t.seed): t for t in trainings if t.end is not None and t.failed is None}
    one_as = _equal_arms(size, complete)
    values = {
        (one_as[arm], seed): t.learnt
        for (arm, seed), t in complete.items()
        if t.is_whole and math.isfinite(t.learnt)
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
        effect = effects.get(one_as.get(arm.name, ""))
        if one_as.get(arm.name) == CONTROL != arm.name:
            effect = NO_EFFECT
        status, reason = _judge_arm(arm, own, failed, complete, effect, spread, problem_of_noise)
        arms.append(ArmVerdict(arm, own, status, reason, effect))
    not_run = [_not_run(arm, seed, trainings) for arm, seed in size.runs]
    return Verdict(size, trainings, arms, spread, [text for text in not_run if text])


def _equal_arms(size: Size, complete: dict[tuple[str, int], Training]) -> dict[str, str]:
    """Find arms that have the same bits in all seeds that they share, at least one.

    To the statistic they are one arm: two trainings that are equal to the last bit are one
    observation of the noise, and as two they would make it seem small.

    Returns:
        dict: arm -> the first arm that it is equal to, or itself.
    """
    names = [arm.name for arm in size.arms if any(name == arm.name for name, _ in complete)]
    found: dict[str, str] = {}
    for name in names:
        seeds = {seed for arm, seed in complete if arm == name}
        for other in dict.fromkeys(found.values()):
            shared = [seed for seed in seeds if (other, seed) in complete]
            pairs = [(complete[name, seed], complete[other, seed]) for seed in shared]
            if pairs and not any(first_difference(mine, theirs) for mine, theirs in pairs):
                found[name] = other
                break
        else:
            found[name] = name
    return found


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
        if not all(map(math.isfinite, [*training.losses, *training.validated.values()])):
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
    if effect == NO_EFFECT:
        return HOLDS, f"the bits of {CONTROL}"
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
    """Compare the seeds that both have, as far as both go."""
    shared = [(t, complete[other, t.seed]) for t in own if (other, t.seed) in complete]
    if not shared:
        return NOT_SHOWN, f"{other} was not trained with the same seed"
    for mine, theirs in shared:
        if difference := first_difference(mine, theirs):
            return FAILS, f"seed {mine.seed}, {difference} of {other}, which must be the same bits"
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
