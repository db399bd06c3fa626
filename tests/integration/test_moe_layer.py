"""A whole MoELayer with our dispatcher against Megatron's `alltoall`: outputs and all gradients."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, EXPERTS, HIDDEN, SEQUENCE, build_layer, initialize, make_config

from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankContext, RankPool


@dataclass(frozen=True)
class LayerCase:
    """One layer configuration; `options` are TransformerConfig fields."""

    name: str
    ep: int = 4
    tp: int = 1
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    # Sequence length of each rank; ranks of one tensor-parallel group must agree.
    sequences: tuple[int, ...] = (SEQUENCE,) * 4

    def __str__(self) -> str:
        return self.name


TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
CAPACITY = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
CASES = [
    LayerCase("ep4"),
    LayerCase("ep2-dp2", ep=2),
    LayerCase("ep1", ep=1),
    LayerCase("ep4-tp2", tp=2),
    LayerCase("top-1", options=TOP_1),
    LayerCase("top-6", options={"moe_router_topk": 6}),
    LayerCase("uneven", sequences=(3, 6, 1, 9)),
    LayerCase("fp32", dtype=torch.float32),
    LayerCase("bf16", dtype=torch.bfloat16, options={"moe_router_topk": 4}),
    LayerCase("bf16-router-too", dtype=torch.bfloat16, options={"moe_router_dtype": None}),
    LayerCase(
        "aux-loss",
        options={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    ),
    LayerCase(
        "seq-aux-loss",
        options={"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    ),
    LayerCase(
        "sinkhorn",
        options={"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    ),
    LayerCase("sigmoid", options={"moe_router_score_function": "sigmoid", "moe_router_topk": 3}),
    LayerCase("groups", options={"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    LayerCase("capacity", options=CAPACITY),
    LayerCase("capacity-by-position", options={**CAPACITY, "moe_token_drop_policy": "position"}),
    LayerCase("pad-to-capacity", options={**CAPACITY, "moe_pad_expert_input_to_capacity": True}),
    LayerCase(
        "pad-to-generous-capacity",
        options={
            "moe_expert_capacity_factor": 2.5,
            "moe_pad_expert_input_to_capacity": True,
        },
    ),
    LayerCase("shared-experts", options={"moe_shared_expert_intermediate_size": 32}),
    LayerCase("probs-on-input", options={**TOP_1, "moe_apply_probs_on_input": True}),
    LayerCase("gradient-accumulation", micro_batches=3),
    LayerCase(
        "recompute",
        options={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        micro_batches=2,
    ),
    LayerCase("aligned", options={"ncclep": EpConfig(alignment=32)}),
    LayerCase("static", options={"ncclep": EpConfig(max_recv_rows=512)}),
    LayerCase("static-aligned", options={"ncclep": EpConfig(max_recv_rows=512, alignment=16)}),
]

# fp64 sums of at most 9 terms of size ~1 in two orders differ by ~1e-15; 1e-12 leaves room for the
# weight gradients, which add up ~100 products.  fp32: the same with 2^-24 instead of 2^-53.  bf16:
# alltoall adds the K terms of a token up in bf16 or fp32 depending on version, we round once per
# rank: a few units of 2^-8 of the largest terms.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def train_on_rank(ctx: RankContext, case: LayerCase, dispatcher: str) -> dict[str, torch.Tensor]:
    """Forward and backward of a few micro-batches; everything that comes out, by name."""
    initialize(case.ep, case.tp)
    config = make_config(dispatcher, case.dtype, case.ep, case.tp, **dict(case.options))
    layer = build_layer(config)
    results: dict[str, torch.Tensor] = {}
    probs_seen: list[torch.Tensor] = []

    def keep_probs(module: Any, inputs: Any, outputs: Any) -> None:
        if outputs[0].requires_grad:  # the first pass of a recomputed layer has no graph
            outputs[0].retain_grad()
            probs_seen.append(outputs[0])

    layer.router.register_forward_hook(keep_probs)
    sequence = case.sequences[ctx.rank] // case.tp
    for micro_batch in range(case.micro_batches):
        generator = torch.Generator().manual_seed(97 * micro_batch + ctx.rank)
        shape = (sequence, BATCH, HIDDEN)
        hidden = torch.randn(shape, generator=generator).to(case.dtype).requires_grad_()
        probe = torch.randn(shape, generator=generator).to(case.dtype)
        out, bias = layer(hidden)
        assert bias is None
        (out * probe).sum().backward()
        results[f"output {micro_batch}"] = out.detach()
        results[f"input gradient {micro_batch}"] = hidden.grad
    for i, probs in enumerate(probs_seen):
        results[f"probability gradient {i}"] = probs.grad
    assert probs_seen
    for name, parameter in layer.named_parameters():
        results[f"gradient of {name}"] = parameter.grad
    results["dispatcher"] = type(layer.token_dispatcher).__name__
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_equals_alltoall(megatron_pool: RankPool, case: LayerCase) -> None:
    ours = megatron_pool.run(train_on_rank, case, "ncclep")
    theirs = megatron_pool.run(train_on_rank, case, "alltoall")
    experts_moved = 0
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.pop("dispatcher") == "NcclEpTokenDispatcher"
        assert other.pop("dispatcher") == "MoEAlltoAllTokenDispatcher"
        assert mine.keys() == other.keys()
        for name in mine:
            a, b = mine[name], other[name]
            if a is None or b is None:
                # An expert without rows: no gradient, or one of zeros.
                assert not any(t is not None and t.any() for t in (a, b)), name
                continue
            assert a.dtype == b.dtype, name
            scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
            error = (a - b).abs().max().item() / scale if b.numel() else 0.0
            assert error < TOLERANCE[case.dtype], f"rank {rank}, {name}: differs by {error}"
            experts_moved += "experts" in name and bool(b.any())
    # Not a comparison of zeros: several experts of several ranks were trained.
    assert experts_moved >= EXPERTS // case.ep


def overflow_on_rank(ctx: RankContext) -> tuple[int, bool, list[str]]:
    initialize(ep=4)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron_ncclep").addHandler(handler)
    options = {"ncclep": EpConfig(max_recv_rows=8)}
    layer = build_layer(make_config("ncclep", torch.float32, 4, **options))
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    for _ in range(2):
        out, _ = layer(hidden)
        out.sum().backward()
    logging.getLogger("megatron_ncclep").removeHandler(handler)
    finite = bool(torch.isfinite(hidden.grad).all())
    return int(layer.token_dispatcher.num_dropped), finite, said


def test_static_overflow_is_counted(megatron_pool: RankPool) -> None:
    results = megatron_pool.run(overflow_on_rank)
    # 4 ranks x 12 tokens x 2 picks = 96 rows for 4 x 8 places, twice.
    assert sum(dropped for dropped, _, _ in results) >= 2 * (96 - 32)
    for dropped, finite, said in results:
        assert finite
        warnings = [text for text in said if "did not fit into max_recv_rows=8" in text]
        assert len(warnings) == (dropped > 0)
