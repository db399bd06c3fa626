"""Megatron's schedule that overlaps two micro-batches (overlap_moe_expert_parallel_comm): the bits
of its schedule without.

It frees the storage of what it takes for a part's own copy, on a CPU too: what backward still needs
would have no values then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_setup import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    build_layer,
    drawn,
    initialize,
    log_calls,
    make_config,
)
from rank_pool import RankContext
from trainer import ModelCase, differences, train

from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release


BF16: dict[str, Any] = {"dtype": torch.bfloat16, "micro_batches": 3}
# It gets its rows as they come.
ONE_EXPERT = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 32}
STATIC = {"ncclep": EpConfig(experts="grouped", max_recv_rows="worst")}
CASES = [
    ModelCase("several-experts", **BF16),
    ModelCase("one-expert", ONE_EXPERT, **BF16, ep=4),
    ModelCase("grouped-static", STATIC, **BF16),
    ModelCase("pipeline", dtype=torch.bfloat16, pp=2, micro_batches=4),
]
OVERLAP = {"overlap_moe_expert_parallel_comm": True}


@pytest.mark.supports(
    *OVERLAP,
    compared="losses and all gradients with those of the schedule without overlap, to the bit",
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_overlap_changes_no_bits(ctx: RankContext, case: ModelCase) -> None:
    overlapped = replace(case, options={**case.options, **OVERLAP})
    assert differences(*(train(ctx, "ncclep", each) for each in (overlapped, case))) == []


def test_weight_gradients_beside_the_backward_of_dispatch(ctx: RankContext) -> None:
    """With overlap_dispatch_backward_with_experts_wgrad Megatron starts them on a stream of their
    own, once the combine of gradients is queued.
    """
    import megatron.core

    found: list[dict[str, torch.Tensor]] = []
    order: list[str] = []
    for is_delayed in (False, True):
        initialize(ep=4)
        config = make_config("ncclep", torch.float32, 4)
        # Set after validation, which wants TransformerEngine: its experts alone delay anything.
        config.overlap_dispatch_backward_with_experts_wgrad = is_delayed
        layer = build_layer(config)
        if is_delayed:
            engine = layer.token_dispatcher.engine
            for owner, name in ((engine, "dispatch"), (engine, "combine"), (layer, "backward_dw")):
                log_calls(order, owner, name, name)
        hidden = drawn(ctx.rank, SEQUENCE, BATCH, HIDDEN).requires_grad_()
        out, _ = layer(hidden)
        out.square().sum().backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
        found[-1] |= {"output": out.detach(), "input": hidden.grad}
    assert differences(*found) == []
    steps = ["dispatch", "combine", "dispatch", "combine", "backward_dw"]
    knows_it = not megatron.core.__version__.startswith(("0.16", "0.17"))
    assert order == (steps if knows_it else steps[:-1])
