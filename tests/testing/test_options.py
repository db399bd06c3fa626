"""The options of tests/conftest.py: what is collected, and what is refused before any test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def collect(*args: str) -> tuple[int, str]:
    """Exit status and output of a pytest that collects but runs nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *args],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_only_the_chosen_ranks_are_collected() -> None:
    status, text = collect("tests/contract", "--ranks", "1", "--engine", "reference")
    assert status == 0
    assert "test_plan.py::test_counts_and_slots_are_the_oracles[reference-1ranks-even]" in text
    assert "2ranks" not in text
    assert "test_gradients_are_the_numeric_ones[" in text
    # Two ranks are needed to make a mistake on the second.
    assert "test_every_rank_raises_the_same_error" not in text
    assert "deselected" in text


def test_gpu_tests_are_not_collected_without_gpus() -> None:
    status, text = collect("tests/gpu", "tests/testing/test_oracle.py")
    assert status == 0
    assert "tests/testing/test_oracle.py" in text
    assert "tests/gpu" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--engine", "nope"], "--engine nope: the engines are"),
        (["--engine", "nccl_ep"], "--engine nccl_ep: cannot run over gloo on the CPU: it needs "),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--iterations", "0"], "--iterations: must be at least 1"),
        (
            ["--backend", "nccl", "--ranks", "1", "--ranks", "999"],
            "--backend nccl needs a GPU for each of 999 ranks",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_is_a_usage_error(args: list[str], message: str) -> None:
    status, text = collect("tests/contract/test_plan.py", *args)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in text
