"""Run `ncclep bench` over the paced test network, and compare its times with what the link allows.

    python scripts/over_network.py --hosts 2 --ranks-on-each 2 --gb-per-s 25 -- \\
        --config models --subjects native --samples 20

Ranks are processes of this machine that appear on several hosts (NCCL_HOSTID), each with a link of
that rate and latency (tests/network/link.h).  They run under MPS, because they share GPUs where
there are fewer of them than ranks, and because the test network copies in a context of its own:
without MPS, a GPU would run the copies and the kernels that wait for them in turns of 2 ms.  The
words after `--` are arguments of `ncclep bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in (".", "scripts", "tests/network", "tests/native")]

import gpu  # noqa: E402
import loop  # noqa: E402

from megatron_ncclep import cli  # noqa: E402
from megatron_ncclep.benchmark import STEPS  # noqa: E402
from megatron_ncclep.benchmark.table import as_text, grid  # noqa: E402


def against_link(result: dict[str, Any], gb_per_s: float) -> str:
    """The times of a bench.json, in brackets divided by what the busiest rank's bytes need."""
    _, *passes = STEPS
    rows = []
    for found in result["shapes"]:
        if found["network"] is None:
            continue
        least_us = found["network"]["hierarchical_bytes"] / gb_per_s * 1e-3
        for subject in found["subjects"]:
            if subject["passes"]:
                times = [subject["passes"][name]["median_us"] for name in passes]
                cells = [f"{time_us:.0f} ({time_us / least_us:.2f})" for time_us in times]
                name = f"{found['shape']['name']}: {subject['name']}"
                rows.append([name, f"{least_us:.0f}", *cells])
    return as_text("", grid(["us", "bytes / rate", *passes], rows)) if rows else ""


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="that ranks appear on (default: 2)")
    add("--ranks-on-each", type=int, default=2, help="default: 2")
    add("--gb-per-s", type=float, default=25.0, help="of a link, each way (default: 25)")
    add("--latency-us", type=float, default=3.0, help="of a link (default: 3)")
    add(
        "--messages", action="store_true",
        help="NCCL's own messages cross the links, as `hierarchical` needs, not the kernels' puts",
    )  # fmt: skip
    add("--out", type=Path, default=Path("runs/network"), help="default: runs/network")
    add("bench", nargs="*", metavar="-- ARGUMENT", help="arguments of `ncclep bench`")
    args = parser.parse_args()
    if "RANK" in os.environ:  # before NCCL reads it
        os.environ["NCCL_HOSTID"] = f"host{int(os.environ['RANK']) // args.ranks_on_each}"
        return cli.main(["bench", *args.bench, "--out", str(args.out), "--overwrite"])
    gpus, plugin = gpu.visible_gpus(), loop.build()
    puts = {"NCCL_RMA_PLUGIN": str(plugin)}
    (file := args.out / "bench.json").unlink(missing_ok=True)
    environment = {
        **os.environ,
        "RMA_LOOP_GBPS": f"{args.gb_per_s:g}",
        "RMA_LOOP_LATENCY_US": f"{args.latency_us:g}",
        **(loop.variables_of_messages(plugin) if args.messages else puts),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    ranks = str(args.hosts * args.ranks_on_each)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "127.0.0.1", "--nproc-per-node", ranks]
    with gpu.mps(bool(gpus), environment) as environment:
        status = subprocess.run([*torchrun, *sys.argv], env=environment).returncode
    if file.is_file():
        print(against_link(json.loads(file.read_text()), args.gb_per_s))
    return status


if __name__ == "__main__":
    sys.exit(main())
