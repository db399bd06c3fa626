"""The statistic of the protocol: the effects of arms, with seeds as blocks, and their intervals."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
from arms import CONTROL

# Student's t: 95 % of it is below these, for 1, 2, ... degrees of freedom; the last stands for all
# larger numbers, and makes intervals a little too wide there.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
# Two results differ by less than this many of their standard deviations in 95 of 100 cases: the
# repeatability limit of ISO 5725-6.
REPEATABILITY = 1.96 * math.sqrt(2)


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
