"""The options of tests/conftest.py: what is collected, and what is refused before any test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.any_python("it starts pytest")


def collect(*args: str, plugins: Path | None = None) -> tuple[int, str]:
    """Exit status and output of a pytest that collects but runs nothing."""
    path = [str(plugins)] if plugins else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *sys.path])},
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
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--iterations", "0"], "--iterations: must be at least 1"),
        (["--hosts", "2"], "--hosts 2: must divide the largest --ranks, 4, and with more"),
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_a_usage_error(args: list[str], message: str) -> None:
    status, text = collect("tests/contract/test_plan.py", *args)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in text


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU here")
@pytest.mark.parametrize(
    ("backend", "engine", "ranks", "message"),
    [
        ("gloo", "nope", 4, "--engine nope: the engines are"),
        ("gloo", "nccl_ep", 4, "--engine nccl_ep: cannot run over gloo on the CPU: it needs "),
        ("nccl", "reference", 999, r"999 ranks on 0 GPU\(s\).*: for tests, NCCL 2.30.0 or newer"),
    ],
)
def test_what_cannot_run_is_refused(
    pytestconfig: pytest.Config, backend: str, engine: str, ranks: int, message: str
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    with pytest.raises(pytest.UsageError, match=message):
        conftest.check_options([engine], [1, ranks], backend)
