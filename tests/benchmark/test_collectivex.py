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

SIZES = {
    "hidden": 64, "topk": 4, "experts": 8, "tokens-ladder": "1 6",
    "warmup": 1, "iters": 2, "trials": 1, "chain-iters": 4, "chain-trials": 1, "chain-drop": 1,
}  # fmt: skip


class Event:
    """In place of a CUDA event."""

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


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
@pytest.mark.parametrize("is_broken", [False, True], ids=["right", "broken"])
def test_its_driver_accepts_our_engine_and_refuses_a_broken_one(
    ctx: RankContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, is_broken: bool
) -> None:
    """One element of the rows that a dispatch returns is wrong."""
    monkeypatch.syspath_prepend(collectivex_folder() / "bench")
    import ep_harness

    from benchmarks.collectivex import NcclEpBackend, arguments

    out = tmp_path / "result.json"
    bench = Path(ep_harness.__file__).parent
    words = arguments(bench, mode, "decode", "cpu", str(out), ctx.num_ranks)
    for name, value in SIZES.items():
        words += [f"--{name}", str(value)]
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    ep_harness.add_common_args(parser)
    args = parser.parse_args(words)
    with mock.patch.multiple(torch.cuda, synchronize=lambda: None, Event=Event):
        backend = NcclEpBackend(args, ctx.rank, ctx.num_ranks, ctx.rank, ctx.device)
        dispatch = backend.dispatch

        def spoiled(problem: Any) -> Any:
            handle = dispatch(problem)
            handle.rows.view(-1, args.hidden)[0, -1] += 1
            return handle

        if is_broken:
            backend.dispatch = spoiled
        status = ep_harness.run_sweep(
            args, backend, torch, dist, ctx.device, ctx.rank, ctx.num_ranks
        )
    backend._engine.close()
    assert status == (3 if is_broken else 0)
    if ctx.rank == 0:
        result = json.loads(out.read_text())
        assert result["identity"]["case_factors"]["case"]["backend"] == "megatron-ncclep"
        rows = result["measurement"]["rows"]
        assert [row["tokens_per_rank"] for row in rows] == [1, 6]
        assert all(row["components"]["pair_period"]["sample_count"] for row in rows)
        assert rows[1]["correctness"]["passed"] != is_broken
