"""`make gpu`, without GPUs: which steps it has, and when it begins each."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ncclep.libraries import extension

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import gpu  # noqa: E402
import gpu_steps  # noqa: E402


def test_every_file_of_tests_gpu_runs() -> None:
    """`tests/gpu` is not collected without GPUs: a file that no step names would never run."""
    named = {word for _, step in gpu_steps.every_step() for word in step.tests.split()}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert sorted(files - named) == []


def test_a_build_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Network steps failed test by test, for minutes each, where nothing could pass."""
    built = SimpleNamespace(build_info=lambda: {"nccl": ""})
    monkeypatch.setattr(extension, "load", lambda: built)
    outcome = gpu.run_step("network", gpu_steps.PARTS["network"][0], tmp_path, 1, "0")
    assert outcome.passed is None
    assert "NCCL_HOME" in outcome.counts


def test_choice_of_steps() -> None:
    names = [step.name for _, step in gpu_steps.chosen_steps(["layers:1", "random"])]
    assert names[0] == gpu_steps.PARTS["layers"][1].name
    assert names[1:] == [step.name for step in gpu_steps.PARTS["random"]]
    assert gpu_steps.chosen_steps([]) == gpu_steps.every_step()
    for wrong, said in (("layer", "there are"), ("layers:9", "0 to 8"), ("layers:x", "0 to 8")):
        with pytest.raises(ValueError, match=said):
            gpu_steps.chosen_steps([wrong])


@pytest.mark.parametrize("gpus", [["0"], ["0", "1"], ["0", "1", "2", "3"]], ids=len)
@pytest.mark.parametrize("cores", [1, 24])
def test_when_steps_begin(gpus: list[str], cores: int) -> None:
    """Each runs once, within the cores and the steps that a GPU takes, and some by themselves.

    The largest ones run first, so that none waits until there are no smaller ones.
    """
    lock, running, ran, most = threading.Lock(), [], [], [0]
    steps = [("part", step) for _, step in gpu_steps.every_step()]

    def run(part: str, step: gpu_steps.Step, where: str) -> None:
        with lock:
            beside = [one for one, gpu in running if gpu == where]
            assert len(beside) < gpu.MOST_ON_A_GPU
            assert not beside or not any(one.alone for one in [step, *beside])
            assert not running or sum(one.cores for one, _ in [*running, (step, where)]) <= cores
            running.append((step, where))
            most[0] = max(most[0], len(running))
        threading.Event().wait(0.002)
        with lock:
            running.remove((step, where))
            ran.append(step)

    gpu.run_all(steps, gpus, cores, run)
    assert sorted(step.name for step in ran) == sorted(step.name for _, step in steps)
    assert most[0] > 2 or cores == 1
    sizes = [step.cores for step in ran if not step.alone]
    assert sizes == sorted(sizes, reverse=True) or cores > 1
    assert max(sizes[-len(sizes) // 2 :]) < max(sizes)


def test_a_step_that_raises_is_no_success() -> None:
    """The others run, and then the command fails: its status was 0."""
    steps, ran = gpu_steps.every_step()[:3], []

    def run(part: str, step: gpu_steps.Step, where: str) -> None:
        ran.append(step)
        if step is steps[0][1]:
            raise FileNotFoundError("planted")

    with pytest.raises(FileNotFoundError, match="planted"):
        gpu.run_all(steps, ["0"], 1, run)
    assert len(ran) == 3
