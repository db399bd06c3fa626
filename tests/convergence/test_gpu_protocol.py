"""The protocol for GPUs: its judgement, on logs made up here, and the whole of it in small."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gpu_protocol
import numpy as np
import pytest
from arm_log import read
from arms import CONTROL, GPU, SIZES, SMALL
from equivalence import REPEATABILITY, compare
from verdict import FAILS, HOLDS, MISSING, NOT_SHOWN, Verdict, judge
from verdict_report import PLOT, TABLE, write_report

# What the logs made up here are like: seeds that differ by this, and roundings that do.
SEEDS = {1: 0.0, 2: 0.011, 3: -0.006}
ROUNDINGS = {1: 0.0004, 2: -0.0003, 3: 0.0002}
ENTROPY = 3.3
LIMIT = ("--seconds", "900")  # a hung run must end the test; a busy machine must not


def lines_of(arm: str, seed: int, learnt: float, **changes: Any) -> list[dict[str, Any]]:
    """The log of a training whose validation losses are `learnt`."""
    settings = {"global-batch-size": 8, "seq-length": 64, "train-iters": 4}
    written = [
        {"type": "settings", "settings": settings, "entropy": changes.get("entropy", ENTROPY)},
        {"type": "steps", "first": 1, "loss": [5.0 + seed, 4.0], "grad_norm": [2.0, 1.5],
         "seconds": 0.5},
        {"type": "steps", "first": 3, "loss": [3.0, 2.0], "grad_norm": [1.0, 1.0], "seconds": 0.25},
        {"type": "valid", "step": 2, "loss": learnt},
        {"type": "valid", "step": 4, "loss": learnt},
        {"type": "start", "layer_apart": 0.004, "problem": changes.get("problem")},
        {"type": "end", "memory": None, "dropped": changes.get("dropped", 0), "seconds": 1.0},
    ]  # fmt: skip
    return [{"arm": arm, "seed": seed, **line} for line in written]


def good_lines() -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Logs of the small size in which all is as it should be."""
    logs = {}
    for arm, seed in SMALL.runs:
        learnt = 1.5 + SEEDS[seed]
        if arm.startswith("reference"):
            learnt += ROUNDINGS[seed]
        problem = "it begins elsewhere" if arm == "mistake: zeroed rows" else None
        if arm == "mistake: swapped weights":
            learnt += 0.05
        logs[arm, seed] = lines_of(arm, seed, learnt, problem=problem)
    return logs


def judged(folder: Path, logs: dict[tuple[str, int], list[dict[str, Any]]]) -> Verdict:
    """Write the logs as two lanes would, and judge them."""
    for index in range(2):
        of_lane = [lines for number, lines in enumerate(logs.values()) if number % 2 == index]
        text = "".join(json.dumps(line) + "\n" for lines in of_lane for line in lines)
        (folder / f"lane-{index}.jsonl").write_text(text)
    return judge(SMALL, read(folder))


def status_of(verdict: Verdict, arm: str) -> tuple[str, str]:
    found = next(one for one in verdict.arms if one.arm.name == arm)
    return found.status, found.reason


# --- the rules -----------------------------------------------------------------------------------


def test_what_is_right_holds_and_mistakes_are_rejected(tmp_path: Path):
    verdict = judged(tmp_path, good_lines())
    assert verdict.holds
    assert verdict.not_run == []
    # Six trainings with three seeds and two arms, and a mistake; what bits decide does not count.
    assert verdict.spread is not None
    assert verdict.spread.degrees == 2
    assert [(arm.arm.name, arm.status) for arm in verdict.arms] == [
        (CONTROL, HOLDS),
        ("reference", HOLDS),
        ("reference, static", HOLDS),
        ("mistake: swapped weights", FAILS),
        ("mistake: zeroed rows", FAILS),
    ]
    write_report(verdict, tmp_path)
    table = (tmp_path / TABLE).read_text()
    assert "The protocol holds." in table
    assert "rejected (FAILS)" in table
    assert (tmp_path / PLOT).stat().st_size > 10_000


def shift(logs: Any, arm: str, nats: float) -> None:
    """Let an arm learn less by `nats`, with every seed."""
    for (name, _), lines in logs.items():
        if name == arm:
            for line in lines:
                if line["type"] == "valid":
                    line["loss"] += nats


MARGIN = REPEATABILITY * float(np.std(list(SEEDS.values()), ddof=1))


@pytest.mark.parametrize(
    ("nats", "status"),
    [
        (0.5 * MARGIN, HOLDS),
        (-0.5 * MARGIN, HOLDS),
        (0.99 * MARGIN, NOT_SHOWN),
        (1.1 * MARGIN, FAILS),
        (-1.1 * MARGIN, FAILS),  # what learns faster is another training too
        (math.nan, FAILS),
    ],
)
def test_what_is_learnt_decides(tmp_path: Path, nats: float, status: str):
    logs = good_lines()
    shift(logs, "reference", nats)
    verdict = judged(tmp_path, logs)
    assert status_of(verdict, "reference")[0] == status
    assert verdict.holds == (status == HOLDS) or status_of(verdict, "reference, static")[0] != HOLDS


def test_a_mistake_that_nothing_sees_is_a_failure(tmp_path: Path):
    logs = good_lines()
    shift(logs, "mistake: swapped weights", -0.05)
    verdict = judged(tmp_path, logs)
    assert status_of(verdict, "mistake: swapped weights")[0] == HOLDS
    assert not verdict.holds
    assert "NOT SEEN" in write_report(verdict, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"problem": "rank 1: the output"}, "before the first step: rank 1: the output"),
        ({"dropped": 3}, "3 rows were dropped"),
    ],
)
def test_how_an_arm_begins_and_what_it_drops(tmp_path: Path, changes: dict[str, Any], words: str):
    logs = good_lines()
    logs["reference", 2] = lines_of("reference", 2, 1.5 + SEEDS[2], **changes)
    status, reason = status_of(judged(tmp_path, logs), "reference")
    assert (status, words in reason) == (FAILS, True), reason


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_bits_are_bits(tmp_path: Path, key: str):
    logs = good_lines()
    steps = logs["reference, static", 1][2]
    steps[key][1] = math.nextafter(steps[key][1], 9)
    status, reason = status_of(judged(tmp_path, logs), "reference, static")
    assert (status, "step 4" in reason) == (FAILS, True), reason


def test_validation_losses_are_bits_too(tmp_path: Path):
    logs = good_lines()
    shift(logs, "reference, static", 1e-9)
    assert status_of(judged(tmp_path, logs), "reference, static")[0] == FAILS


def test_a_part_of_the_steps_has_bits_to_compare(tmp_path: Path):
    logs = good_lines()
    part = logs["reference, static", 1]
    logs["reference, static", 1] = [line for line in part if line.get("first") != 3][:2] + part[-2:]
    status, reason = status_of(judged(tmp_path, logs), "reference, static")
    assert (status, reason) == (HOLDS, "2 steps with the bits of reference")


def test_trainings_with_the_same_bits_are_one_to_the_noise(tmp_path: Path):
    """A kernel that gives the bits of another one is no second observation."""
    logs = good_lines()
    for seed in SEEDS:
        logs["mistake: swapped weights", seed] = [
            {**line, "arm": "mistake: swapped weights"} for line in logs["reference", seed]
        ]
    verdict = judged(tmp_path, logs)
    effects = {arm.arm.name: arm.effect for arm in verdict.arms}
    assert effects["mistake: swapped weights"] == effects["reference"]
    assert verdict.spread is not None
    assert verdict.spread.degrees == 2


def test_the_bits_of_the_control_need_no_noise(tmp_path: Path):
    logs = {key: lines for key, lines in good_lines().items() if key[0] == CONTROL}
    for seed in SEEDS:
        logs["reference", seed] = [{**line, "arm": "reference"} for line in logs[CONTROL, seed]]
    verdict = judged(tmp_path, logs)
    assert verdict.spread is None
    assert status_of(verdict, "reference") == (HOLDS, "the bits of alltoall")


def test_a_control_that_learns_nothing_proves_nothing(tmp_path: Path):
    logs = good_lines()
    logs[CONTROL, 3] = lines_of(CONTROL, 3, 1.5 + SEEDS[3], entropy=1.2)
    status, reason = status_of(judged(tmp_path, logs), CONTROL)
    assert (status, "seed 3 has not learnt" in reason) == (FAILS, True), reason


# --- what is missing -----------------------------------------------------------------------------


def test_what_did_not_end_is_named(tmp_path: Path):
    """A command that is stopped leaves a line behind that is not whole."""
    logs = good_lines()
    del logs["reference, static", 1]
    logs["mistake: zeroed rows", 1] = logs["mistake: zeroed rows", 1][:3]
    logs["reference", 3] = [
        *logs["reference", 3][:2],
        {"arm": "reference", "seed": 3, "type": "failed", "reason": "Traceback\nOSError: gone"},
    ]
    judged(tmp_path, logs)
    with (tmp_path / "lane-0.jsonl").open("a") as log:
        log.write('{"arm": "alltoall", "seed": 1, "type": "st')
    verdict = judge(SMALL, read(tmp_path))
    assert verdict.not_run == [
        "reference, seed 3: 2 steps, then: OSError: gone",
        "reference, static, seed 1: not begun",
        "mistake: zeroed rows, seed 1: cut off after 4 steps",
    ]
    assert status_of(verdict, "reference")[0] == FAILS
    assert status_of(verdict, "reference, static")[0] == MISSING
    assert status_of(verdict, "mistake: zeroed rows")[0] == MISSING
    assert not verdict.holds
    table = write_report(verdict, tmp_path)
    assert all(text in table for text in verdict.not_run)


def test_a_mistake_that_crashes_was_not_rejected(tmp_path: Path):
    logs = good_lines()
    key = "mistake: zeroed rows", 1
    logs[key] = [{"arm": key[0], "seed": 1, "type": "failed", "reason": "a bug"}]
    verdict = judged(tmp_path, logs)
    assert status_of(verdict, key[0])[0] == MISSING
    assert not verdict.holds


def test_without_noise_nothing_is_shown(tmp_path: Path):
    logs = {key: lines for key, lines in good_lines().items() if key[0] == CONTROL or key[1] == 1}
    verdict = judged(tmp_path, logs)
    assert status_of(verdict, "reference") == (
        NOT_SHOWN,
        "no arm beside alltoall has two seeds, by which the noise is known",
    )
    write_report(verdict, tmp_path)


def test_nothing_at_all_is_reported_too(tmp_path: Path):
    verdict = judge(GPU, read(tmp_path))
    assert len(verdict.not_run) == len(GPU.runs)
    assert not verdict.holds
    assert "DOES NOT HOLD" in write_report(verdict, tmp_path)


# --- the statistic -------------------------------------------------------------------------------


def test_effect_and_interval_of_a_balanced_design():
    """Three seeds each: the mean difference, and Student's interval around it, by hand."""
    differences = {1: 0.1, 2: 0.3, 3: 0.2}
    values = {(CONTROL, seed): 10.0 * seed for seed in differences}
    values |= {("x", seed): 10.0 * seed + apart for seed, apart in differences.items()}
    spread, effects = compare(values)
    assert spread.degrees == 2
    # Differences have twice the variance of the noise; their own standard deviation is 0.1.
    assert spread.noise == pytest.approx(0.1 / math.sqrt(2))
    assert spread.margin == pytest.approx(1.96 * math.sqrt(2) * 10)
    assert effects["x"].nats == pytest.approx(0.2)
    # t of 2 degrees, times 0.1 / sqrt(3), as a paired test has it.
    assert effects["x"].half_width == pytest.approx(2.920 * 0.1 / math.sqrt(3))


def test_an_arm_with_one_seed_is_compared_with_that_seed():
    values = {(CONTROL, seed): 10.0 * seed for seed in (1, 2, 3)}
    values |= {("x", seed): 10.0 * seed + 0.01 * (-1) ** seed for seed in (1, 2, 3)}
    values |= {("y", 2): 20.5, ("z", 4): 1.0}  # nothing to compare the last one with
    _, effects = compare(values)
    assert effects["y"].nats == pytest.approx(0.5, abs=0.02)
    assert effects["y"].half_width > effects["x"].half_width
    assert "z" not in effects


def test_an_arm_that_is_off_by_the_margin_passes_one_time_in_twenty():
    """The size of the test: what it must not accept, it accepts with the promised probability."""
    random, rounds, passed = np.random.default_rng(5), 1000, 0
    for _ in range(rounds):
        seeds = random.normal(0, 1, 3)
        values = {(CONTROL, s): seeds[s] + random.normal(0, 0.2) for s in range(3)}
        margin = REPEATABILITY * float(np.std(list(values.values()), ddof=1))
        values |= {("x", s): seeds[s] + margin + random.normal(0, 0.2) for s in range(3)}
        spread, effects = compare(values)
        passed += abs(effects["x"].nats) + effects["x"].half_width < spread.margin
    # Two standard deviations of a count of 1000 with probability 0.05 are 14.
    assert passed / rounds < 0.05 + 0.014


# --- the whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES.values(), ids=lambda size: size.name)
def test_sizes_are_whole(size: Any):
    """Every arm is trained, the control of a seed first, and what gives the bits is trained too."""
    names = [arm.name for arm in size.arms]
    assert {arm for arm, _ in size.runs} == set(names)
    assert len(set(size.runs)) == len(size.runs)
    assert [seed for arm, seed in size.runs if arm == CONTROL] == [1, 2, 3]
    for arm, seed in size.runs:
        assert size.runs.index((CONTROL, seed)) <= size.runs.index((arm, seed))
        if other := size.arm(arm).same_bits_as:
            assert (other, seed) in size.runs
            assert size.arm(other).same_bits_as is None


@pytest.mark.parametrize(
    ("visible", "lanes"),
    [("0,1,2,3", ["0,1", "2,3"]), ("5,7", ["5,7"]), ("3", ["3"]), ("0,1,2", ["0,1"])],
)
def test_gpus_are_divided_into_pairs(
    monkeypatch: pytest.MonkeyPatch, visible: str, lanes: list[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_protocol.lanes("cuda") == lanes


@pytest.mark.any_python("it trains all arms")
def test_protocol_in_small(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """It trains all arms on a CPU, accepts what is right and rejects both mistakes."""
    status = gpu_protocol.main(["run", str(tmp_path), "--size", "small", "--device", "cpu", *LIMIT])
    verdict = judge(SMALL, read(tmp_path))
    said = capfd.readouterr().out
    assert verdict.not_run == [], said
    assert verdict.holds, said
    assert status == 0, said
    for arm in verdict.arms:
        if arm.arm.mistake is not None:
            assert "the output of the first MoE layer" in arm.reason
    assert (tmp_path / PLOT).is_file()
    with pytest.raises(SystemExit, match="holds logs already"):
        gpu_protocol.main(["run", str(tmp_path), "--size", "small", "--device", "cpu", *LIMIT])
