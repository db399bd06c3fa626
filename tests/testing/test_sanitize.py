"""tests/gpu/sanitize.py: a rank under a tool passes only if the tool says that it found nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ncclep.testing.processes import Ended

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "sanitize.py"


NOTHING = "rank 0: as the oracle says; {}\n========= ERROR SUMMARY: 0 errors"
HAZARDS = "rank 0: as the oracle says; {}\n===== RACECHECK SUMMARY: 3 hazards displayed "


@pytest.mark.parametrize(
    ("exit_code", "output", "problem"),
    [
        (0, NOTHING, None),
        (0, HAZARDS.replace("3", "0") + "(0 errors, 0 warnings)", None),
        (86, HAZARDS + "(0 errors, 3 warnings)", None),
        (86, HAZARDS + "(1 error, 2 warnings)", "3 hazards displayed (1 error, 2 warnings)"),
        (86, HAZARDS + "(10 errors, 2 warnings)", "3 hazards displayed (10 errors, 2 warnings)"),
        (86, "========= ERROR SUMMARY: 2 errors", "2 errors"),
        (0, "=== RACECHECK SUMMARY: 1 hazard displayed", "1 hazard displayed"),
        (0, f"{NOTHING}\n===== ERROR SUMMARY: 3 errors", "3 errors"),
        (1, NOTHING, "exit code 1"),
        (None, NOTHING, "exit code None"),
        (86, "========= ERROR SUMMARY: 0 errors", "exit code 86"),  # nothing says that it was right
        (0, "all is well", "the tool gave no summary"),
    ],
)
def test_what_passes(exit_code: int | None, output: str, problem: str | None) -> None:
    assert script().problem(Ended(exit_code, output)) == problem


def test_every_rank_of_a_process_has_to_be_right() -> None:
    ended = Ended(0, "".join(NOTHING.replace("0:", f"{rank}:", 1) + "\n" for rank in range(3)))
    assert script().problem(ended, 3) is None
    assert script().problem(ended, 4) == "exit code 0"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    sanitize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sanitize)
    return sanitize
