"""A rank of a job over two nodes: step after step, until the network between them is cut.

`test_networks.py` starts it, each machine's ranks in a network and with a host name of their own.
"""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from compare import assert_same_bits
from patience import patient

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine

# For starting, and for a call; what a link that is slow, or a busy machine, does not come near.
LONG_S, DEADLINE_S = patient(60.0), 6.0
NUM_TOKENS, HIDDEN = 50, 64


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None  # just made
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first = create_engine(
        dist.group.WORLD, 2 * num_ranks, EpConfig(engine="hierarchical", timeout_s=LONG_S)
    )
    second = create_engine(
        dist.group.WORLD, 2 * num_ranks, EpConfig(engine="hierarchical", timeout_s=DEADLINE_S)
    )
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(NUM_TOKENS, 2 * num_ranks, generator=generator)
    topk_idx = scores.topk(3, dim=1).indices
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    outputs = []
    start, step = time.monotonic(), 0
    try:
        while True:
            engine = first if step == 0 else second
            if step == 1:  # everything is made
                # torch lets no process end before a collective that it has given up is over.
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLINE_S))
            plan = engine.plan(topk_idx)
            rows, _ = engine.dispatch(plan, x)
            scale = 1 + torch.arange(len(rows))[:, None] + 1000 * rank
            outputs.append(engine.combine(plan, rows * scale)[0])
            assert_same_bits(outputs[-1], outputs[0], f"step {step}")
            digest = hashlib.sha256(bytes(outputs[-1].view(torch.uint8).flatten().tolist()))
            step, start = step + 1, time.monotonic()
            print(f"step {step}: {digest.hexdigest()}", flush=True)
    finally:
        print(f"over after {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
