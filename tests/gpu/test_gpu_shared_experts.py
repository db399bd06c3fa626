"""Shared experts during dispatch and combine (moe_shared_expert_overlap): the bits of a layer
without overlap.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from layer_case import LayerCase, train_on_rank
from megatron_setup import ep_config
from rank_pool import RankContext

OPTIONS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_moe_experts": 16,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_overlap": True,
}


@pytest.mark.supports(
    "moe_shared_expert_overlap",
    compared="outputs and all gradients with those without overlap, to the bit (input gradients: "
    "one rounding)",
)
@pytest.mark.parametrize("max_recv_rows", [None, "worst"], ids=["exact", "static"])
def test_overlap_changes_no_bits(
    ctx: RankContext, engine_name: str, max_recv_rows: str | None
) -> None:
    ncclep = ep_config(engine_name, max_recv_rows=max_recv_rows)
    case = LayerCase(
        "bits",
        ep=ctx.num_ranks,
        dtype=torch.bfloat16,
        options={**OPTIONS, "ncclep": ncclep},
        micro_batches=3,
        sequences=(512,) * 4,
    )
    options = {**case.options, "moe_shared_expert_overlap": False}
    without = train_on_rank(ctx, dataclasses.replace(case, options=options), "ncclep")
    overlapped = train_on_rank(ctx, case, "ncclep")
    assert without.keys() == overlapped.keys()
    for name, value in without.items():
        if name.startswith("input gradient"):
            # Autograd adds the router's, the shared and the routed experts' parts in the order in
            # which they come: two roundings to bf16's 8 bits, in another order.
            scale = value.abs().max().item()
            torch.testing.assert_close(overlapped[name], value, rtol=2**-7, atol=2**-7 * scale)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(overlapped[name], value), name
        else:
            assert overlapped[name] == value, name
