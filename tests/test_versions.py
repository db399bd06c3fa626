"""docs/versions.md: what its table is made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ran import Recorder, write

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import versions  # noqa: E402


def test_a_run_comes_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer one of the same versions takes its place; other versions get a row's entry."""
    monkeypatch.setattr(versions, "RUNS", tmp_path / "cpu-runs.json")
    for release, passed in (("0.18.2", 3), ("0.19.2", 4), ("0.18.2", 5)):
        write(tmp_path / "ran", release, passed)
        versions.RUNS.write_text(versions.merged(sorted((tmp_path / "ran").glob("*.json"))))
    runs = json.loads(versions.RUNS.read_text())
    assert [run["passed"] for run in runs] == [5, 4]
    (row,) = (line for line in versions.rows().splitlines() if line.startswith("| Megatron-Core"))
    assert row.endswith("| 0.18.2, 0.19.2 |")


@pytest.mark.parametrize(("status", "files"), [(0, 1), (1, 0), (2, 0)])
def test_only_a_run_that_passed_counts(status: int, files: int, tmp_path: Path) -> None:
    class Reporter:
        def getreports(self, kind: str) -> list[str]:
            return ["a", "b"] if kind == "passed" else []

    Recorder(tmp_path, "0.19.2").pytest_terminal_summary(Reporter(), status)  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("*.json"))) == files
