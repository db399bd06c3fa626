"""`ncclep bench --mode ll`: what it refuses, checks, times and shows, on the CPU."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_result import sample_result

from megatron_ncclep import cli
from megatron_ncclep.benchmark import command
from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.plot import draw
from megatron_ncclep.benchmark.shapes import Shape, load
from megatron_ncclep.benchmark.subjects import PAIR, Setting
from megatron_ncclep.benchmark.table import WIDTH, render
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.errors import InputError
from megatron_ncclep.ranks.group import EpGroup

SHAPE = Shape("small", tokens=5, hidden=16, experts=4, top_k=2)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks; an engine that cannot run here and was not asked for is no failure."""
    assert cli.main(["bench", "--mode", "ll", "--smoke", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (tmp_path / "bench.txt").read_text() == render(result)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "NO GPU TOOK PART" in capfd.readouterr().out
    assert result["options"]["mode"] == "ll"
    assert (result["shapes"], result["trainings"], result["failures"]) == ([], [], [])
    assert [r["shape"]["name"] for r in result["low_latency"]] == ["smoke-1", "smoke-6"]
    for measured in result["low_latency"]:
        assert set(measured) == set(sample_result()["low_latency"][0])
        status = {subject["name"]: subject["status"] for subject in measured["subjects"]}
        assert status == {"native": "unavailable", "reference": "ok"}
        (reference,) = [s for s in measured["subjects"] if s["name"] == "reference"]
        for name in PAIR:
            times = reference["passes"][name]
            assert 0 < times["min_us"] <= times["p50_us"] <= times["p99_us"]
            assert times["count"] == load("low_latency_smoke").samples
        assert 0 < measured["wire_bytes"] <= measured["shape"]["tokens"] * 64 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--subjects", "alltoall"), "graphs can hold: native, reference, nccl_ep_library,"),
        (("--subjects", "nccl_ep"), "measures what has the mode"),
        (("--subjects", "nccl_ep_library:transformer-engine+pull_push"), "what has the mode"),
        (("--max-recv-rows", "worst"), "no subject has a fixed number of received rows"),
        (("--config", "training"), "has trainings only"),
        (("--config", "smoke"), "alignment 16: low-latency mode has no blocks"),
        (("--ranks", "3"), "256 experts cannot be divided over 3 ranks"),
        (("--model-network",), "leave --device, --mode out"),
    ],
)
def test_what_would_be_ignored_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.main(["bench", "--mode", "ll", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_on_gpus_graphs_hold_what_is_measured() -> None:
    """A host that waits would have failed in the capture, with every shape."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    job = Job.make(parser.parse_args(["--mode", "ll"]), 2, "cuda")
    assert job.subjects == ("native", "nccl_ep_library")
    wrong = parser.parse_args(["--mode", "ll", "--subjects", "reference"])
    with pytest.raises(InputError, match=r"graphs can hold: native, nccl_ep_library,"):
        Job.make(wrong, 2, "cuda")


# --- what is checked -----------------------------------------------------------------------------


@pytest.fixture
def prepared() -> Iterator[LowLatencySubject]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    setting = Setting(0, 1, "cpu", 60.0, lambda: dist.new_group([0]))
    made = LowLatencySubject("reference", setting, Workload(SHAPE.case(1, "cpu"), 0))
    yield made
    made.close()
    EpGroup.of(dist.group.WORLD).close()
    dist.destroy_process_group()


def swap(rows: torch.Tensor) -> None:
    rows[0, [1, 3]] = rows[0, [3, 1]]


def change(tensor: torch.Tensor) -> None:
    tensor.view(-1)[2] += 1


@pytest.mark.parametrize(
    ("name", "mutation", "message"),
    [
        ("rows", swap, r"from rank 0: rows\[1, 0\] is .*; 2 of 5 rows differ"),
        ("topk_idx", change, r"topk_idx\[1, 0\] is "),
        ("weights", change, r"weights\[1, 0\] is "),
        ("counts", lambda counts: counts.fill_(4), "4 rows, expected 5"),
        ("out", change, r"combine: rank 0: out\[0, 2\] is .*; 1 of 5 rows differ"),
    ],
)
def test_what_is_wrong_is_seen(
    prepared: LowLatencySubject,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutation: Callable[[torch.Tensor], Any],
    message: str,
) -> None:
    assert prepared.problem() is None
    changed = "combine" if name == "out" else "dispatch"
    original = getattr(prepared, changed)

    def wrong() -> Any:
        result = original()
        mutation(result if name == "out" else getattr(result, name))
        return result

    monkeypatch.setattr(prepared, changed, wrong)
    with pytest.raises(AssertionError, match=message):
        assert prepared.problem() is None, prepared.problem()


# --- what is shown -------------------------------------------------------------------------------


def test_numbers_of_the_table(tmp_path: Path) -> None:
    """101 operations from 7 us on: the median is 57, the 99th percentile 106."""
    result = sample_result()
    text = render(result)
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "native", "57.0", "106.0", "56.0", "105.0", "63.0", "112.0", "14.3", "30.0",
            "ok"] in lines  # fmt: skip
    assert ["8", "native", "57.0", "106.0", "56.0", "105.0", "70.0", "119.0", "114.7", "30.0",
            "ok"] in lines  # fmt: skip
    assert text.count("low-latency mode: H 7168, E 256, K 8, bfloat16") == 1
    assert "reference, T 8: not measured: it is not there" in text
    assert "NO GPU" not in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    on_cpu = copy.deepcopy(result)
    on_cpu["low_latency"][0]["on_gpu"] = False
    on_cpu["low_latency"][1] |= {"error": "it died", "subjects": []}
    text = render(on_cpu)
    assert "NO GPU TOOK PART" in text
    assert "T 8: nothing was measured: it died" in text
    for number, shown in enumerate((result, on_cpu)):
        draw(shown, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
