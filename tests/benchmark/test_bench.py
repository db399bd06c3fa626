"""`ncclep bench` and `python -m benchmarks` from end to end, on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

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


class Done(NamedTuple):
    """A finished run."""

    status: int | None
    stdout: str
    stderr: str
    text: str  # of bench.txt
    result: dict[str, Any]  # of bench.json


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
    text, result = ((out / f"bench.{kind}").read_text() for kind in ("txt", "json"))
    return Done(status, stdout.read_text(), stderr, text, json.loads(result))


def test_smoke(trainer: Trainer, tmp_path: Path) -> None:
    configured, sample = load("smoke"), sample_result()
    # Trainings that cannot run, are wrong, or have too little room; the control is made unasked.
    wrong = ["train:ncclep:native", "train:ncclep:wrong", "train:ncclep:reference:static"]
    subjects = [name for name in configured.subjects if name != "train:alltoall"]
    done = run(
        trainer, tmp_path, "be_command", "benchmarks.__main__", "--smoke",
        # 128 tokens of a rank in a micro-batch choose 4 experts each.
        "--subjects", ",".join([*subjects, *wrong]), "--max-recv-rows", "448",
        NCCLEP_LOCAL_RANKS="1",  # two ranks that count as two machines, for the engine that asks
    )  # fmt: skip
    result = done.result
    assert done.status == 1, done.stdout + done.stderr
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert done.text in done.stdout
    assert done.text == render(result)
    # The sample in sample_result.py, with which the table is tested, has the same form.
    assert set(result) == set(sample)
    assert [failure.split(" was ")[0].split(": ")[1] for failure in result["failures"]] == [
        *["nccl_ep_library"] * 2, wrong[0], f"{wrong[1]} wrong", f"{wrong[2]} wrong",
    ]  # fmt: skip
    assert result["machine"]["device"] == "cpu"
    assert result["versions"]["torch"]
    assert result["options"]["samples"] == 3
    for found, shape in zip(result["shapes"], configured.shapes, strict=True):
        assert set(found) == set(sample["shapes"][0])
        assert found["shape"]["name"] == shape.name
        assert (found["error"], found["ceiling_reason"]) == (None, "no GPUs")
        assert 0 < found["wire_bytes"] <= shape.tokens * shape.row_bytes
        # A row for each other rank that needs it, which is all of its machine.
        network = found["network"]
        assert (network["machines"], network["ranks_on_each"]) == (2, 1)
        assert network["hierarchical_bytes"] == found["wire_bytes"] < network["flat_bytes"]
        measured = [name for name in subjects if not is_train(name)]
        assert [subject["name"] for subject in found["subjects"]] == measured
        for subject in found["subjects"]:
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
                rate = found["wire_bytes"] / passes["dispatch"]["median_us"] / 1e3
                assert passes["dispatch"]["gb_per_s"] == pytest.approx(rate)
    (training,) = result["trainings"]
    assert set(training) == set(sample["trainings"][0])
    assert training["error"] is None
    assert training["tokens"] == 512  # 2 sequences of 64 in each of 2 micro-batches of 2 ranks
    subject, unavailable, wrong, dropping = training["subjects"]
    assert (subject["name"], subject["status"]) == ("train:ncclep:reference", "ok"), subject
    assert set(subject) == set(sample["trainings"][0]["subjects"][0])
    times = subject["step"]
    assert 0 < times["p10_us"] <= times["median_us"] <= times["p90_us"]
    assert len(subject["turns_us"]) == 2
    assert subject["tokens_per_s"] == pytest.approx(512 / times["median_us"] * 1e6)
    assert subject["losses"][-1] < subject["losses"][0]
    assert subject["loss_apart"] < 1e-5
    assert (subject["kinds_us"], subject["host_us"], subject["memory"]) == ({}, None, None)
    for other, status, reason in (
        (unavailable, "unavailable", "turn 1: engine 'native'"),
        (wrong, "wrong", "the output of the first MoE layer is "),
        (dropping, "wrong", "rows did not fit into 448 received rows and were dropped"),
    ):
        assert (other["status"], other["step"], other["tokens_per_s"]) == (status, {}, None)
        assert reason in other["reason"]
    assert "train:ncclep:native was requested and cannot run" in done.stderr
    assert "train:ncclep:wrong wrong: rank " in done.stderr


def test_low_latency_mode_under_torchrun(trainer: Trainer, tmp_path: Path) -> None:
    """Only torchrun's first rank prints and writes; an engine that cannot run here and was not
    asked for is no failure.
    """
    done = run(trainer, tmp_path, "be_rank", "--mode", "ll", "--smoke", ranks=2)
    assert done.status == 0, done.stdout + done.stderr
    assert done.stdout.count("ncclep bench low_latency_smoke: 2 ranks") == 1
    result = done.result
    assert done.text == table.render(result)
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


def test_engines_that_go_wrong(trainer: Trainer, tmp_path: Path) -> None:
    """A failure costs its subject or its shape, in which what is wrong is not timed.

    Processes that have seen a failure measure nothing more: after a graph whose capture failed no
    later shape could use a random state.
    """
    shape = {"tokens": 12, "hidden": 16, "top_k": 2, "dtype": "float32"}
    config = tmp_path / "config.yaml"
    shapes = [{"name": f"experts-{n}", "experts": n, **shape} for n in (WRONG, RAISES, 16, HANGS)]
    # The shape that hangs takes so long; 2 s were once too few for one that does not.
    config.write_text(yaml.safe_dump({"shapes": shapes, "timeout_s": patient(4)}))
    done = run(
        trainer, tmp_path / "out", "be_command", "megatron_ncclep.cli", "bench",
        "--config", str(config), "--device", "cpu", "--ranks", "2", "--samples", "1",
        "--subjects", "wrong,wronglater,nccl_ep,failing,reference",
    )  # fmt: skip
    found = done.result["shapes"]
    assert done.status == 1
    assert [[subject["status"] for subject in shape["subjects"]] for shape in found] == [
        ["wrong", "wrong", "unavailable", "ok", "ok"],
        ["ok", "wrong", "unavailable", "failed", "ok"],
        ["ok", "wrong", "unavailable", "ok", "ok"],
        [],
    ], [shape["error"] for shape in found]
    # One is wrong from the start, one turns wrong while it is timed, and one is not there.
    wrong, later, *_ = found[0]["subjects"]
    assert wrong["passes"] == later["passes"] == {}
    assert "before timing: dispatch: rank 1, rows[5, 3] is " in wrong["reason"]
    assert "rank 0" not in wrong["reason"]
    assert "after timing: combine: rank 0, rows[0, " in later["reason"]
    assert "wrong: WRONG: before timing: dispatch: rank 1, rows[5, 3] " in done.stdout
    assert "experts-8: wrong wrong: before timing" in done.stderr
    assert "experts-8: nccl_ep was requested and cannot run" in done.stderr
    assert "experts-8: nccl_ep is left out: unavailable: " in done.stderr
    # A rank raises, or hangs, of which the stack of every thread is shown.
    reason = found[1]["subjects"][3]["reason"]
    assert "ZeroDivisionError: a bug" in reason
    assert "PeerError: rank 0 of 2" in reason
    assert "rank 1 died" in found[3]["error"]
    assert "experts-14: failing\n" in done.stderr
    assert "experts-14: reference" not in done.stderr
    assert "in dispatch" in done.stderr
    assert "nothing was measured: " in done.stdout
