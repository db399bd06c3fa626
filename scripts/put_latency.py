"""One rank of bare puts: how long a word takes from a kernel to the kernel of a rail peer.

    python scripts/put_latency.py FOLDER

`scripts/over_network.py put` starts it on every rank.  A kernel puts a word to each rail peer and
waits for theirs.  Of two peers the one that begins earlier waits longer by as much as the other one
waits less, so the mean of their times is the latency, whenever they began.  FOLDER gets `put.json`:
the latencies that rank 0 sees, in us.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup

TIMEOUT_S, WARMUP, PUTS = 20.0, 20, 200
KERNEL = "probe_kernel"


def kernel_times_us() -> list[float]:
    """The time of each of the last `PUTS` kernels on this rank.  Collective."""
    assert dist.group.WORLD is not None  # just made
    communicator = communicator_of(EpGroup.of(dist.group.WORLD), TIMEOUT_S)
    native = extension.load()
    window = native.Window(communicator, 1 << 20, over_network=True)
    rails = native.Rails(communicator, TIMEOUT_S)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(WARMUP + PUTS):
            rails.probe(window, TIMEOUT_S)
        torch.cuda.synchronize()
    dist.barrier()
    rails.close()
    window.close()
    kernels = sorted(
        (event for event in seen.events() if KERNEL in event.name),
        key=lambda event: event.time_range.start,
    )
    return [float(event.time_range.elapsed_us()) for event in kernels][-PUTS:]


def main() -> None:
    """Be a rank."""
    folder = Path(sys.argv[1])
    topology.use_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=2 * TIMEOUT_S))
    try:
        mine, every = kernel_times_us(), [list[float]()] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        peer = every[len(every) // 2]  # of two hosts
        latencies = [(a + b) / 2 for a, b in zip(mine, peer, strict=True)]
        (folder / "put.json").write_text(json.dumps({"latencies_us": latencies}) + "\n")


if __name__ == "__main__":
    main()
