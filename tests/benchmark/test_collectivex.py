"""CollectiveX's own inputs, oracle and driver, around our engine `reference`, on a CPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext
from stand_ins import collectivex_folder

from megatron_ncclep.errors import InputError

SIZES = {"hidden": 64, "topk": 4, "experts": 8, "tokens-ladder": "1 6"}
TIMING = {"warmup": 1, "iters": 2, "trials": 1}
CHAINS = {"chain-iters": 4, "chain-trials": 1, "chain-drop": 1}


class Event:
    """In place of a CUDA event."""

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


def swapped(results: Any) -> Any:
    rows, weights = results
    return rows.flip(0), weights


def without_a_row(results: Any) -> Any:
    rows, weights = results
    rows = rows.clone()
    rows[0, -1] += 1
    return rows, weights


BUGS = {"swapped rows": swapped, "a wrong element": without_a_row}


def test_its_command_takes_what_ours_gives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(collectivex_folder() / "bench")
    import ep_harness
    import run_ep

    from benchmarks import collectivex

    def main() -> int:
        from ep_nccl import NCCLEPBackend

        parser = argparse.ArgumentParser()
        parser.add_argument("--backend", choices=["nccl-ep"])
        ep_harness.add_common_args(parser)
        args = parser.parse_args()
        assert NCCLEPBackend is collectivex.NcclEpBackend
        assert args.case_id == "h200-megatron-ncclep-deepseek-v3-normal-prefill-ep4-uniform-bf16"
        assert (args.hidden, args.topk, args.tokens_ladder) == (7168, 8, "4096")
        return 3

    monkeypatch.setattr(run_ep, "main", main)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "ep_nccl", None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = ["--phase", "prefill", "--runner", "h200", "--out", str(tmp_path)]
    assert collectivex.main([*words, "--tokens-ladder", "4096"]) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="several hosts"):
        collectivex.main(words)


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
@pytest.mark.parametrize("bug", [None, *BUGS])
def test_its_driver_accepts_our_engine_and_refuses_a_broken_one(
    ctx: RankContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, bug: str | None
) -> None:
    monkeypatch.syspath_prepend(collectivex_folder() / "bench")
    import ep_harness

    from benchmarks.collectivex import NcclEpBackend, arguments

    out = tmp_path / "result.json"
    bench = Path(ep_harness.__file__).parent
    words = arguments(bench, mode, "decode", "cpu", str(out), ctx.num_ranks)
    for name, value in {**SIZES, **TIMING, **CHAINS}.items():
        words += [f"--{name}", str(value)]
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    ep_harness.add_common_args(parser)
    args = parser.parse_args(words)
    with mock.patch.multiple(torch.cuda, synchronize=lambda: None, Event=Event):
        backend = NcclEpBackend(args, ctx.rank, ctx.num_ranks, ctx.rank, ctx.device)
        if bug is not None:
            break_dispatch(backend, BUGS[bug])
        status = ep_harness.run_sweep(
            args, backend, torch, dist, ctx.device, ctx.rank, ctx.num_ranks
        )
    backend._engine.close()
    assert status == (3 if bug else 0)
    if ctx.rank == 0:
        result = json.loads(out.read_text())
        assert result["identity"]["case_factors"]["case"]["backend"] == "megatron-ncclep"
        rows = result["measurement"]["rows"]
        assert [row["tokens_per_rank"] for row in rows] == [1, 6]
        assert all(row["components"]["pair_period"]["sample_count"] for row in rows)
        assert rows[1]["correctness"]["passed"] == (bug is None)


def break_dispatch(backend: Any, bug: Any) -> None:
    """Let what comes out of a dispatch, [n, hidden], pass through one of `BUGS`."""
    original = backend.dispatch

    def dispatch(problem: Any) -> Any:
        handle = original(problem)
        if backend.mode == "normal":
            handle.rows, handle.weights = bug((handle.rows, handle.weights))
        else:
            rows = handle.rows.flatten(0, 1)
            rows.copy_(bug((rows.clone(), None))[0])
        return handle

    backend.dispatch = dispatch
