"""`ncclep bench` and `python -m benchmarks` from end to end, on the CPU."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_bench import HANGS, RAISES, WRONG
from sample_result import sample_result
from small_job import TIMEOUT_S, Trainer
from timeouts import patient

from benchmarks.catalogue import LAUNCHED, is_train
from benchmarks.shapes import load
from benchmarks.table import render
from megatron_ncclep.benchmark import PAIR, STEPS, WHOLE, table


@dataclass(frozen=True)
class Done:
    """A finished run."""

    status: int | None
    stdout: str
    stderr: str
    out: Path

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "bench.json").read_text())
        return found


def run(
    trainer: Trainer, out: Path, entry: str, *arguments: str, ranks: int = 1, **environment: str
) -> Done:
    """Run a function of broken_bench.py, in forks of a process that has imported Megatron-Core."""
    out.mkdir(exist_ok=True)
    stdout = out / "stdout"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    ended = trainer.server.run(
        f"broken_bench:{entry}", [str(stdout), *arguments, "--out", str(out)], ranks, TIMEOUT_S,
        **environment,
    )  # fmt: skip
    (status,) = {rank.exit_code for rank in ended}
    stderr = "".join(rank.output for rank in ended)
    stderr = re.sub(r"(?m)^([\w-]+), \d+ s: ", r"\1: ", stderr)  # the seconds so far
    return Done(status, stdout.read_text(), stderr, out)


# --- the smoke run -------------------------------------------------------------------------------


SUBJECTS = [name for name in load("smoke").subjects if name != "train:alltoall"]
# Trainings that cannot run, are wrong, or have too little room; the control is made unasked.
WRONG_TRAININGS = ["ncclep:native", "ncclep:wrong", "ncclep:reference:static"]


@pytest.fixture(scope="module")
def smoke(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Done:
    subjects = ",".join([*SUBJECTS, *(f"train:{name}" for name in WRONG_TRAININGS)])
    return run(
        trainer, tmp_path_factory.mktemp("smoke"), "be_command", "benchmarks.__main__", "--smoke",
        # 128 tokens of a rank in a micro-batch choose 4 experts each.
        "--subjects", subjects, "--max-recv-rows", "448",
        NCCLEP_LOCAL_RANKS="1",  # two ranks that count as two machines, for the engine that asks
    )  # fmt: skip


def test_smoke_writes_everything(smoke: Done) -> None:
    assert smoke.status == 1, smoke.stdout + smoke.stderr
    assert (smoke.out / "bench.png").read_bytes().startswith(b"\x89PNG")
    text = (smoke.out / "bench.txt").read_text()
    assert text in smoke.stdout
    assert text == render(smoke.result)


def test_json_of_the_smoke_run(smoke: Done) -> None:
    result = smoke.result
    # The sample in sample_result.py, with which the table is tested, has the same form.
    assert set(result) == set(sample_result())
    assert [failure.split(" was ")[0].split(": ")[1] for failure in result["failures"]] == [
        *["nccl_ep_library"] * 2, "train:ncclep:native", "train:ncclep:wrong wrong",
        "train:ncclep:reference:static wrong",
    ]  # fmt: skip
    assert result["machine"]["device"] == "cpu"
    assert result["versions"]["torch"]
    assert result["options"]["samples"] == 3
    configured = load("smoke")
    measured = [name for name in SUBJECTS if not is_train(name)]
    assert [shape["shape"]["name"] for shape in result["shapes"]] == [
        shape.name for shape in configured.shapes
    ]
    for found, shape in zip(result["shapes"], configured.shapes, strict=True):
        assert set(found) == set(sample_result()["shapes"][0])
        assert found["error"] is None
        assert found["ceiling_reason"] == "no GPUs"
        assert 0 < found["wire_bytes"] <= shape.tokens * shape.row_bytes
        # A row for each other rank that needs it, which is all of its machine.
        network = found["network"]
        assert (network["machines"], network["ranks_on_each"]) == (2, 1)
        assert network["hierarchical_bytes"] == found["wire_bytes"] < network["flat_bytes"]
        assert [subject["name"] for subject in found["subjects"]] == measured


def test_every_subject_of_the_smoke_run_is_measured_or_says_why_not(smoke: Done) -> None:
    for shape in smoke.result["shapes"]:
        for subject in shape["subjects"]:
            passes = subject["passes"]
            if subject["name"] == "nccl_ep_library":
                assert subject["status"] == "unavailable"
                assert "GPU" in subject["reason"]
                continue
            assert subject["status"] == "ok", subject
            assert tuple(passes) == (WHOLE if subject["kind"] in LAUNCHED else STEPS)
            assert all(0 < t["p10_us"] <= t["median_us"] <= t["p90_us"] for t in passes.values())
            assert subject["sum_us"] == pytest.approx(sum(t["median_us"] for t in passes.values()))
            if "dispatch" in passes:
                rate = shape["wire_bytes"] / passes["dispatch"]["median_us"] / 1e3
                assert passes["dispatch"]["gb_per_s"] == pytest.approx(rate)


def test_training_steps_of_the_smoke_run(smoke: Done) -> None:
    (training,) = smoke.result["trainings"]
    assert set(training) == set(sample_result()["trainings"][0])
    assert training["error"] is None
    # 2 sequences of 64 in each of 2 micro-batches of 2 ranks.
    assert training["tokens"] == 512
    subject, unavailable, wrong, dropping = training["subjects"]
    assert subject["name"] == "train:ncclep:reference"
    assert set(subject) == set(sample_result()["trainings"][0]["subjects"][0])
    assert subject["status"] == "ok", subject
    times = subject["step"]
    assert 0 < times["p10_us"] <= times["median_us"] <= times["p90_us"]
    assert len(subject["turns_us"]) == 2
    assert subject["tokens_per_s"] == pytest.approx(512 / times["median_us"] * 1e6)
    assert subject["losses"][-1] < subject["losses"][0]
    assert subject["loss_apart"] < 1e-5
    assert (subject["kinds_us"], subject["host_us"], subject["memory"]) == ({}, None, None)
    others = (unavailable, wrong, dropping)
    assert [other["status"] for other in others] == ["unavailable", "wrong", "wrong"]
    assert "turn 1: engine 'native'" in unavailable["reason"]
    assert "the output of the first MoE layer is " in wrong["reason"]
    assert (wrong["step"], wrong["tokens_per_s"]) == ({}, None)
    assert "rows did not fit into 448 received rows and were dropped" in dropping["reason"]
    assert "train:ncclep:native was requested and cannot run" in smoke.stderr
    assert "train:ncclep:wrong wrong: rank " in smoke.stderr


def test_low_latency_mode_under_torchrun(trainer: Trainer, tmp_path: Path) -> None:
    """Only torchrun's first rank prints and writes; an engine that cannot run here and was not
    asked for is no failure.
    """
    done = run(trainer, tmp_path, "be_rank", "--mode", "ll", "--smoke", ranks=2)
    assert done.status == 0, done.stdout + done.stderr
    assert done.stdout.count("ncclep bench low_latency_smoke: 2 ranks") == 1
    result = done.result
    assert (tmp_path / "bench.txt").read_text() == table.render(result)
    assert "NO GPU WAS USED" in done.stdout
    assert result["options"]["mode"] == "ll"
    assert (result["shapes"], result["failures"]) == ([], [])
    assert [r["shape"]["name"] for r in result["low_latency"]] == ["smoke-1", "smoke-6"]
    for measured in result["low_latency"]:
        assert set(measured) == set(sample_result()["low_latency"][0])
        native, reference = measured["subjects"]
        assert (native["status"], reference["status"]) == ("unavailable", "ok")
        for name in PAIR:
            times = reference["passes"][name]
            assert 0 < times["min_us"] <= times["p50_us"] <= times["p99_us"]
            assert times["count"] == load("low_latency_smoke").samples
        assert 0 < measured["wire_bytes"] <= measured["shape"]["tokens"] * 64 * 2


# --- engines that go wrong -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Engines of broken_bench.py and the reference, in shapes that decide what goes wrong."""
    folder = tmp_path_factory.mktemp("broken")
    shape = {"tokens": 12, "hidden": 16, "top_k": 2, "dtype": "float32"}
    config = folder / "config.yaml"
    shapes = [{"name": f"experts-{n}", "experts": n, **shape} for n in (WRONG, RAISES, 16, HANGS)]
    config.write_text(yaml.safe_dump({"shapes": shapes, "timeout_s": patient(2)}))
    return run(
        trainer, folder / "out", "be_command", "megatron_ncclep.cli", "bench",
        "--config", str(config), "--device", "cpu", "--ranks", "2", "--samples", "1",
        "--subjects", "wrong,wronglater,nccl_ep,failing,reference",
    )  # fmt: skip


def test_a_failure_costs_its_subject_or_its_shape(broken: Done) -> None:
    """Processes that have seen a failure measure nothing more: after a graph whose capture failed
    no later shape could use a random state.
    """
    assert broken.status == 1
    assert [[s["status"] for s in shape["subjects"]] for shape in broken.result["shapes"]] == [
        ["wrong", "wrong", "unavailable", "ok", "ok"],
        ["ok", "wrong", "unavailable", "failed", "ok"],
        ["ok", "wrong", "unavailable", "ok", "ok"],
        [],
    ]


def test_what_is_wrong_or_cannot_run_is_a_failure_and_not_timed(broken: Done) -> None:
    """One is wrong from the start, one turns wrong while it is timed, and one is not there."""
    wrong, later, *_ = broken.result["shapes"][0]["subjects"]
    assert wrong["passes"] == later["passes"] == {}
    assert "before timing: dispatch: rank 1, rows[5, 3] is " in wrong["reason"]
    assert "rank 0" not in wrong["reason"]
    assert "after timing: combine: rank 0, rows[0, " in later["reason"]
    assert "wrong: WRONG: before timing: dispatch: rank 1, rows[5, 3] " in broken.stdout
    assert "experts-8: wrong wrong: before timing" in broken.stderr
    assert "experts-8: nccl_ep was requested and cannot run" in broken.stderr
    assert "experts-8: nccl_ep is left out: unavailable: " in broken.stderr


def test_a_rank_that_raises_or_hangs(broken: Done) -> None:
    """Of a rank that hangs, the stack of every thread is shown."""
    _, raised, _, hung = broken.result["shapes"]
    reason = raised["subjects"][3]["reason"]
    assert "ZeroDivisionError: a bug" in reason
    assert "PeerError: rank 0 of 2" in reason
    assert "rank 1 died" in hung["error"]
    assert "experts-14: failing\n" in broken.stderr
    assert "experts-14: reference" not in broken.stderr
    assert "in dispatch" in broken.stderr
    assert "nothing was measured: " in broken.stdout
