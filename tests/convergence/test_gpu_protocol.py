"""The protocol in bf16: its criterion on numbers made up here, and the whole of it in small."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gpu_protocol
import numpy as np
import pytest
from gpu_protocol import CONTROL, FAILS, HOLDS, NOT_RUN, NOT_SHOWN, SEEDS, SMALL, judge, report
from timeouts import patient

_, REFERENCE, SWAPPED, ZEROED = SMALL
CONTROLS = (1.5, 1.511, 1.494)
NOISE = (0.0004, -0.0003, 0.0002)
MARGIN = gpu_protocol.REPEATABILITY * float(np.std(CONTROLS, ddof=1))


def good() -> gpu_protocol.Trained:
    """Trainings in which everything is as it should be."""
    trained = {}
    for seed, control, effect in zip(SEEDS, CONTROLS, NOISE, strict=True):
        of_arms = {CONTROL: 0.0, REFERENCE: effect, SWAPPED: 0.05, ZEROED: 0.0}
        for arm, apart in of_arms.items():
            problem = "its first step differs" if arm is ZEROED else ""
            validated = [control + apart] * 6
            trained[arm.name, seed] = {"validated": validated, "problem": problem, "entropy": 3.3}
    return trained


@pytest.mark.parametrize(
    ("arm", "change", "status"),
    [
        (REFERENCE, {}, HOLDS),
        (CONTROL, {"entropy": 1.4}, FAILS),  # it has learnt nothing
        (REFERENCE, 0.5 * MARGIN, HOLDS),
        (REFERENCE, 0.99 * MARGIN, NOT_SHOWN),
        (REFERENCE, 1.1 * MARGIN, FAILS),
        (REFERENCE, -1.1 * MARGIN, FAILS),  # what learns faster is another training too
        (REFERENCE, math.nan, FAILS),
        (REFERENCE, {"problem": "rank 1: the output"}, FAILS),
        (REFERENCE, None, NOT_RUN),
        (SWAPPED, -0.05, NOT_SHOWN),
        (ZEROED, {"problem": ""}, NOT_SHOWN),
        (ZEROED, None, NOT_RUN),  # a mistake that crashes was not rejected
    ],
)
def test_one_thing_decides(arm: gpu_protocol.Arm, change: Any, status: str):
    trained = good()
    for seed in arm.seeds:
        if isinstance(change, float):
            trained[arm.name, seed]["validated"][-1] += 6 * change
        elif change is None:
            del trained[arm.name, seed]
        else:
            trained[arm.name, seed] |= change
    assert judge(arm, trained)[0] == status
    assert report(SMALL, trained)[0] == (status == HOLDS)


@pytest.mark.any_python("it trains all arms")
def test_protocol_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It accepts what is right, rejects both mistakes, and trains nothing twice."""
    status = gpu_protocol.main(["run", str(tmp_path), "--small", "--seconds", str(patient(900))])
    table = capsys.readouterr().out
    assert status == 0, table
    begun = [f"{arm.name}, seed {seed}" for arm, seed in gpu_protocol.in_order(SMALL)]
    assert table.splitlines()[: len(begun)] == begun
    assert table.count("before the first step: the output of the first MoE layer") == 2, table
    assert gpu_protocol.main(["run", str(tmp_path), "--small", "--seconds", "0"]) == 0
    assert capsys.readouterr().out in table
