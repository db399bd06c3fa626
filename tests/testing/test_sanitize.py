"""tests/gpu/sanitize.py: a rank under a tool passes only if the tool says that it found nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from processes import Ended

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


def test_rounds_of_low_latency_mode_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the reference engine: what is run under the tools, and that it can find a difference."""
    sanitize = script()
    assert sanitize.rounds_of("native") == ["0", "4", "low-latency"]
    assert sanitize.rounds_of("nccl_ep") == ["0", "4"]
    assert sanitize.rounds_of("native", ["--low-latency"]) == ["low-latency"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ctx = sanitize.RankContext(0, 1, dist.group.WORLD, "cpu")
        assert sanitize.do(ctx, "reference", sanitize.LOW_LATENCY)
        assert capsys.readouterr().out == f"rank 0: {sanitize.RIGHT}; low-latency mode\n"
        rounds = sanitize.rounds_on_rank

        def wrong(*arguments: Any, **named: Any) -> Any:
            results = rounds(*arguments, **named)
            results[2]["out"][-1, -1] += 1
            return results

        monkeypatch.setattr(sanitize, "rounds_on_rank", wrong)
        assert not sanitize.do(ctx, "reference", sanitize.LOW_LATENCY)
        assert "rank 0: bf16-1ranks: out of rank 0 of 1, round 2" in capsys.readouterr().out
    finally:
        dist.destroy_process_group()


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    sanitize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sanitize)
    return sanitize
