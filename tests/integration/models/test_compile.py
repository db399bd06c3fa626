"""torch.compile around our dispatcher: what is run eagerly, to the bit or, where inductor writes
kernels of its own, up to their rounding; and an end to compiling.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_case import COMPILES_S, Compiler, compiled_model_on_rank, compiled_on_rank

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankPool

CASES: dict[str, dict[str, Any]] = {
    "exact": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
        "ncclep": EpConfig(first_timeout_s=COMPILES_S),
    },
    "static": {
        "ncclep": EpConfig(experts="grouped", max_recv_rows="worst", first_timeout_s=COMPILES_S)
    },
}


# What torch makes of our code does not depend on the release.
@pytest.mark.parametrize("name", CASES)
def test_compiled_layer(megatron_pool: RankPool, name: str) -> None:
    """torch went through the engine into the exchange of messages between hosts, and made 77 graphs
    of one layer, in a minute.
    """
    assert megatron_pool.run(compiled_on_rank, CASES[name]) == [[]] * megatron_pool.size


# Its kernels add in other orders and have exponentials of their own.  Megatron's router and loss
# take theirs in fp32 whatever the model's dtype: off by some 1e-7; a wrong row by 0.1 and more.
INDUCTOR = Compiler(inductor=True, dtype=torch.float64, bound=1e-5)


@pytest.mark.any_python("it compiles C++; test_compiled_layer shows what torch makes of bytecode")
def test_inductor(megatron_pool: RankPool) -> None:
    """What users have by default: graphs become kernels, those of backward too, and autograd nodes
    of ours stand in between.
    """
    # A hundred graphs.
    num_graphs, *_ = megatron_pool.run(compiled_model_on_rank, INDUCTOR, timeout=600)
    assert 0 < num_graphs[0] <= num_graphs[-3] == num_graphs[-1], num_graphs
    # Where two experts have as many rows in the first step, torch takes the number for one and
    # compiles once more; each of the two layers has experts.  Traced into, our code added 4.
    assert num_graphs[-1] <= num_graphs[0] + 2, num_graphs
