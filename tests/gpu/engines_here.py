"""Print what this node can check: a line for each engine, and one for its GPUs.

python tests/gpu/engines_here.py [ENGINE ...]      default: every engine of the registry

    nccl_ep<TAB>
    reference<TAB>
    gpus<TAB>2

An engine's line ends with the reason why it cannot run in a group of two ranks (of one, when there
is but one GPU), and with nothing when it can.
"""

from __future__ import annotations

import sys

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, choose_engine
from megatron_ncclep.errors import EngineUnavailableError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext, RankPool


def obstacle_on_rank(ctx: RankContext, name: str) -> str:
    try:
        choose_engine(EpGroup.of(ctx.group), EpConfig(engine=name))
    except EngineUnavailableError as error:
        return str(error)
    return ""


def main(names: list[str]) -> None:
    gpus = torch.cuda.device_count()
    pool = RankPool(min(gpus, 2), "nccl") if gpus else None
    for name in names:
        if name not in ENGINES:
            reason = f"unknown; the engines are {', '.join(ENGINES)}"
        elif pool is None:
            reason = "there is no GPU"
        else:
            reason = pool.run(obstacle_on_rank, name)[0]
        print(f"{name}\t{' '.join(reason.split())}")
    if pool is not None:
        pool.close()
    print(f"gpus\t{gpus}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ENGINES))
