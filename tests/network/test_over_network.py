"""What `scripts/over_network.py` makes of times, and what it tells its ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest


def test_times_are_compared_with_those_of_the_bytes(script: Any) -> None:
    """125 of 128 tokens' rows of 1 KB cross, which takes 10.24 us; the other shape has no network,
    and the other subject could not run.
    """
    passes = {
        name: {"median_us": us} for name, us in zip(script.STEPS, range(9, 54, 9), strict=True)
    }
    passes["dispatch"]["median_us"] = 10.24
    ran, other = {"name": "native", "passes": passes}, {"name": "nccl_ep", "passes": {}}
    shape = {"shape": {"name": "small"}, "subjects": [ran, other]}
    network = {"machines": 2, "ranks_on_each": 1, "hierarchical_bytes": 125 * 1024}
    shapes = [{**shape, "network": network}, {**shape, "network": None}]
    _, head, row = script.against_link({"shapes": shapes}, 12.5).splitlines()
    assert head.split()[-4:] == list(script.STEPS[1:])
    assert row.split("  ", 1)[0] == "small: native"
    assert " ".join(row.split()[2:]) == "10 10 (1.00) 27 (2.64) 36 (3.52) 45 (4.39)"


def test_ranks_know_their_hosts_and_run_the_benchmark(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(script.cli, "main", lambda words: told.append(words) or 3)
    command = ["over_network.py", "--ranks-on-each", "2", "--out", str(tmp_path), "--", "--smoke"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("NCCL_HOSTID", "")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        assert script.main() == 3
        assert os.environ["NCCL_HOSTID"] == f"host{rank // 2}"
    assert told == [["bench", "--smoke", "--out", str(tmp_path), "--overwrite"]] * 4


def test_it_starts_the_ranks_with_their_link(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program in place of the ranks' says what it was given, as the result of rank 0."""
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "rank.py").write_text(
        "import json, os, sys\n"
        "with open(sys.argv[-1] + os.environ['RANK'], 'w') as file:\n"
        "    json.dump(dict(os.environ), file)\n"
    )
    words = ["--hosts", "2", "--ranks-on-each", "1", "--gb-per-s", "12.5", "--", str(tmp_path)]
    monkeypatch.setattr(script.loop, "build", lambda: "plugin.so")
    monkeypatch.setattr(script.gpu, "visible_gpus", list)
    for messages in ([], ["--messages"]):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "rank.py"), *messages, *words])
        assert script.main() == 0
        for rank in range(2):
            given = json.loads((tmp_path.parent / f"{tmp_path.name}{rank}").read_text())
            assert given["WORLD_SIZE"] == "2"
            assert (given["RMA_LOOP_GBPS"], given["RMA_LOOP_LATENCY_US"]) == ("12.5", "3")
            assert ("NCCL_NET_PLUGIN" in given) == bool(messages)
            assert ("NCCL_RMA_PLUGIN" in given) != bool(messages)
