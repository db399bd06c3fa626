"""What `scripts/over_network.py` makes of measurements: times against the link, bytes, speedups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


def case(script: Any, part: str = "ht", engine: str = "native") -> Any:
    return script.Case(part, script.Grid(2, 1), 12.5, (), engine)


def found(**us: float) -> dict[str, Any]:
    """A shape of bench.json: 125 of 128 tokens' rows of 1 KB cross, which takes 10.24 us."""
    passes = {name: {"median_us": of} for name, of in us.items()}
    return {
        "shape": {"name": "small", "tokens": 128, "experts": 4, "top_k": 2},
        "row_bytes": 1024,
        "network": {"machines": 2, "ranks_on_each": 1, "hierarchical_bytes": 125 * 1024},
        "subjects": [{"name": "native", "status": "ok", "passes": passes}],
        "error": None,
    }


def test_times_are_compared_with_those_of_the_bytes(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"plan": 99, "dispatch": 10.24, "combine": 11.264, "bwd_dispatch": 11.7}
    monkeypatch.setattr(script, "HT_TOKENS", 128)
    for last, met in ((11.7, True), (11.8, False)):
        read = script.rows_against_link(case(script), found(**times, bwd_combine=last))
        assert read["ratio"]["dispatch"] == pytest.approx(1)
        assert read["ratio"]["combine"] == pytest.approx(1.1)
        assert read["met"] is met
        assert read["model_bytes"] == pytest.approx(128 * 5 / 6 * 1024)
        text = script.described({"name": "a", "problem": "", "seconds": 1, "shapes": [read]})
        assert (" yes " if met else " NO ") in text[-1]


def test_the_aim_of_few_tokens_is_latency_bytes_and_a_constant(script: Any) -> None:
    read = script.rows_against_link(case(script, "ll"), found())
    one_way = 3 + 10.24 + 25
    assert read["aim_us"] == pytest.approx(
        {"dispatch": one_way, "combine": one_way, "pair": 2 * one_way}
    )


def test_what_failed_is_said(script: Any) -> None:
    broken = found()
    broken["subjects"][0] |= {"status": "failed", "reason": "no network card", "passes": {}}
    read = script.rows_against_link(case(script), broken)
    assert read["problem"] == "no network card"
    text = script.described({"name": "a", "problem": "", "seconds": 1, "shapes": [read]})
    assert "  small: no network card" in text


def test_counted_bytes_are_those_of_all_rounds(script: Any) -> None:
    crossing = 128 * 5 / 6  # rows that a rank puts, in the mean
    # Weights and values of all tokens of a chunk; before each chunk its pairs and node tokens.
    rows = 4 * (8 + 1024 * crossing) + 2 * 4 * 128 * 2
    plan = 8 * (2 + 1) + 8 * 128 + 8 * crossing + 2 * 4 * 2 + 4 * 128
    put = round((3 + 20 + 3) * (rows + plan))

    def differs(put: int, came: int, refused: int = 0) -> bool:
        one = {"puts": 9, "bytes": put, "bytes_in": came, "refused": refused}
        told = script.counted_against_model(case(script), [found()], [one, one])
        assert told["model"] == pytest.approx(2 * (3 + 20 + 3) * (rows + plan))
        return told["differs"]

    assert not differs(put, put)
    assert differs(put, put - 8)
    assert differs(put, put, refused=1)
    assert differs(round(1.03 * put), round(1.03 * put))


def test_native_is_compared_with_the_same_links_and_shape(script: Any) -> None:
    ours, theirs = case(script), case(script, "hierarchical", "hierarchical")
    results = {}
    for each, us in ((ours, (10, 20, 10, 20)), (theirs, (15, 25, 12, 20))):
        times = dict(zip(script.PASSES, us, strict=True))
        results[each.name] = {"shapes": [script.rows_against_link(each, found(**times))]}
    (line,) = script.compared(results)
    assert "small: 1.20 (1.50 1.25 1.20 1.00); >= 1.3: NO" in line


RANK = """
import os, sys, time
os.write(1, " ".join(os.environ[n] for n in ("RANK", "NCCL_HOSTID", "EXTRA")).encode() + b"\\n")
if sys.argv[1] == os.environ["RANK"]:
    sys.exit(3)
if sys.argv[1] != "none":
    time.sleep(300)
"""


def test_ranks_know_their_hosts_and_end(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also when one of them fails, and the others would wait for it."""
    monkeypatch.setattr(sys.modules["host_ranks"], "GRACE_S", 0.1)
    log, grid = tmp_path / "log", script.Grid(2, 2)
    for failing, problem in (("none", ""), ("1", "rank 1 ended with 3")):
        command = [sys.executable, "-c", RANK, failing]
        told = script.run_ranks(grid, command, {"EXTRA": "x"}, log, 60, [])
        assert problem in told
        assert ("rank 2 was stopped" in told) == bool(problem)
    assert script.run_ranks(grid, [*command[:3], "none"], {"EXTRA": "x"}, log, 60, []) == ""
    said = [f"{rank} host{rank // 2} x" for rank in range(4)]
    assert sorted(log.read_text().splitlines()) == said
