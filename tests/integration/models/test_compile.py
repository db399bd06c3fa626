"""torch.compile around our dispatcher: what is run eagerly, to the bit or, where inductor writes
kernels of its own, up to their rounding; and an end to compiling.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_case import COMPILES_S, STEPS, Compiler, assert_compiles, compiling
from trainer import Model, ModelCase

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext

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


@pytest.mark.parametrize("name", CASES)
def test_compiled_layer(ctx: RankContext, name: str) -> None:
    """torch went through the engine into the exchange of messages between hosts, and made 77 graphs
    of one layer, in a minute.
    """
    assert_compiles(ctx, CASES[name])


# Its kernels add in other orders and have exponentials of their own.  Megatron's router and loss
# take theirs in fp32 whatever the model's dtype: off by some 1e-7; a wrong row by 0.1 and more.
INDUCTOR = Compiler(inductor=True, dtype=torch.float64, bound=1e-5)


@pytest.mark.any_python("it compiles C++; test_compiled_layer shows what torch makes of bytecode")
@pytest.mark.limit_s(600)
def test_inductor(ctx: RankContext) -> None:
    """What users have by default: graphs become kernels, those of backward too, and autograd nodes
    of ours stand in between.

    Ranks compile for themselves, and there are few cores: only rank 0 does.  The others run eagerly
    again, and wait for it while it compiles.
    """
    ncclep = EpConfig(first_timeout_s=COMPILES_S)
    options = {"ncclep": ncclep, "num_layers": 1}
    case = ModelCase("inductor", options, dtype=INDUCTOR.dtype, ep=ctx.num_ranks)
    graphs: list[Any] = []
    num_graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return INDUCTOR.compile(graph, inputs)

    results: list[list[torch.Tensor | None]] = [[], []]
    for is_compiled, found in zip((False, ctx.rank == 0), results, strict=True):
        model = Model(ctx, "ncclep", case)
        (gpt,) = model.chunks
        with compiling():
            run = torch.compile(gpt, backend=backend) if is_compiled else gpt
            for step in range(STEPS):
                losses = run(**model.batches(step, case.sequence)[0])
                losses.mean().backward()
                found.append(losses.detach())
                num_graphs += [len(graphs)] if is_compiled else []
        found += [parameter.main_grad for parameter in gpt.parameters()]
        for layer in gpt.decoder.layers:  # the first step has not ended
            assert layer.mlp.token_dispatcher.engine.timeout_s == COMPILES_S
    INDUCTOR.check(*results)
    if ctx.rank == 0:
        assert 0 < num_graphs[0] <= num_graphs[-3] == num_graphs[-1], num_graphs
        # Where two experts have as many rows in the first step, torch takes the number for one and
        # compiles once more.  Traced into, our code added 2.
        assert num_graphs[-1] <= num_graphs[0] + 1, num_graphs
