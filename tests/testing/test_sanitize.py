"""tests/gpu/sanitize.py: a rank under a tool passes only if the tool says that it found nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron_ncclep.testing.processes import Ended

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "sanitize.py"


@pytest.mark.parametrize(
    ("exit_code", "output", "problem"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", None),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None),
        (86, "========= ERROR SUMMARY: 2 errors", "2 errors"),
        (0, "=== RACECHECK SUMMARY: 1 hazard displayed", "1 hazard displayed"),
        (0, "========= ERROR SUMMARY: 0 errors\n===== ERROR SUMMARY: 3 errors", "3 errors"),
        (1, "========= ERROR SUMMARY: 0 errors", "exit code 1"),
        (None, "========= ERROR SUMMARY: 0 errors", "exit code None"),
        (0, "all is well", "the tool gave no summary"),
    ],
)
def test_what_passes(exit_code: int | None, output: str, problem: str | None) -> None:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    sanitize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sanitize)
    assert sanitize.problem(Ended(exit_code, output)) == problem
