"""A script as `ncclep run` runs them: dispatches and combines without end, after saying "step"."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine

TOP_K = 2


def main() -> None:
    dist.init_process_group("gloo")
    engine = create_engine(dist.group.WORLD, 4, EpConfig(engine="reference"))
    while True:
        plan = engine.plan(torch.tensor([[0, 3], [1, 2]]))
        rows, _ = engine.dispatch(plan, torch.ones(2, 8))
        engine.combine(plan, rows)
        print(f"step of rank {dist.get_rank()}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
