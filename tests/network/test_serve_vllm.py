"""What `scripts/serve_vllm.py` gives each rank, and how it compares answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_ranks_know_their_hosts_gpus_and_ports(script: Any) -> None:
    for gpus, theirs in (("5", "5555"), ("4,5,6,7", "4567")):
        common = {"CUDA_VISIBLE_DEVICES": gpus, "LD_PRELOAD": "/a.so:/b/libnccl.so.2"}
        ranks = [script.environment(rank, 2, Path("out"), common) for rank in range(4)]
        assert [each["NCCL_HOSTID"] for each in ranks] == ["host0", "host0", "host1", "host1"]
        assert "".join(each["CUDA_VISIBLE_DEVICES"] for each in ranks) == theirs
        assert {each["VLLM_NCCL_SO_PATH"] for each in ranks} == {"/b/libnccl.so.2"}
        assert ("NCCL_MULTI_RANK_GPU_ENABLE" in ranks[3]) == (gpus == "5")
    first, other = (" ".join(script.options("ncclep", rank, Path("m"), 80, 81)) for rank in (0, 3))
    assert "--port 80 " in first
    assert "--headless --data-parallel-start-rank 3" in other
    assert all("--data-parallel-rpc-port 81 " in each for each in (first, other))


def test_answers_are_compared_until_they_part(script: Any) -> None:
    a = {"tokens": [1] * 32, "logprobs": [-1.0] * 32}
    b = {"tokens": [1, 1, 2] + [1] * 29, "logprobs": [-1.5, -1.25, *[-9.0] * 30]}
    row = script.compare([a, a], [b, a])
    assert row == " 1 of 2 |   34 of 64 |  2 | 0.00000 | 0.2500 | 0.5000"
