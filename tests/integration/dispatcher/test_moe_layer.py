"""A whole MoELayer with our dispatcher against Megatron's `alltoall`: outputs and all gradients.

Shapes of batches and more routers: test_shapes.py.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from layer_case import LayerCase, assert_same_training
from megatron_setup import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    SWIGLU,
    build_layer,
    initialize,
    make_config,
    new_layer,
    selective,
)
from on_ranks import gathered
from rank_pool import RankContext

import megatron_ncclep
from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ON_INPUT = TOP_1 | {"moe_apply_probs_on_input": True}
CAPACITY = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
PADDED = CAPACITY | {"moe_pad_expert_input_to_capacity": True}
GROUPED = {"ncclep": EpConfig(experts="grouped")}
STATIC = {"ncclep": EpConfig(max_recv_rows="worst", alignment=16)}
SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
SHARED_OVERLAP = SHARED | {"moe_shared_expert_overlap": True}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1}
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
EXPERT_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
BIASED = {"add_bias_linear": True}


# Not Megatron's own, which would have to be imported here; so nothing is fused.
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


CLAMPED_GLU = {
    "gated_linear_unit": True,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
}
RECOMPUTE = selective("moe")
# Megatron wants moe_grouped_gemm for moe_act.
AGAIN = selective("moe_act") | {"moe_grouped_gemm": True}
SLICES = {"ep": 2, "etp": 2}  # experts in two slices
IN_FLIGHT: dict[str, Any] = {"micro_batches": 2, "in_flight": True}
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
FP32: dict[str, Any] = {"dtype": torch.float32}
INTEGERS: dict[str, Any] = {**SLICES, **BF16, "tp": 2, "integers": True}


def layer(name: str, *options: dict[str, Any], **fields: Any) -> LayerCase:
    """A case with all of these options; the later ones win."""
    return LayerCase(name, options={k: v for part in options for k, v in part.items()}, **fields)


CASES = [
    layer("top-6", {"moe_router_topk": 6}),
    layer("bf16", {"moe_router_topk": 4}, **BF16),
    layer("bf16-router-too", {"moe_router_dtype": None}, **BF16),
    layer("sinkhorn", SINKHORN),
    layer("groups", GROUPS),
    layer("shared-overlap", SHARED_OVERLAP, **IN_FLIGHT),
    layer("shared-overlap-tp2", SHARED_OVERLAP, tp=2),
    layer("shared-overlap-recompute", SHARED_OVERLAP, RECOMPUTE, STATIC, micro_batches=2),
    layer("expert-bias", EXPERT_BIAS),
    layer("probs-on-input", ON_INPUT),
    layer(
        "recompute-shared-experts",
        SHARED,
        selective("shared_experts", "moe"),
        **IN_FLIGHT,
        same_bits=True,
    ),
    layer("swiglu", SWIGLU, {"bias_activation_fusion": False}, **BF16, same_bits=True),
    layer(
        "swiglu-kept-in-fp8",
        SWIGLU,
        {"activation_func_fp8_input_store": True},
        **BF16,
        same_bits=True,
    ),
    layer("squared-relu", {"activation_func": squared_relu}, same_bits=True),
    layer("biased-clamped-glu", CLAMPED_GLU, BIASED, same_bits=True),
    # Rows of padding would add to the biases' gradients, had they any weight.
    layer("biased-static", BIASED, STATIC, micro_batches=2),
    layer("aligned", {"ncclep": EpConfig(alignment=32)}),
    layer("grouped-swiglu", GROUPED, SWIGLU, **FP32, ep=2),
    layer("grouped-bf16", GROUPED, SWIGLU, {"activation_func_clamp_value": 0.2}, **BF16),
    layer("grouped-swiglu-again", GROUPED, SWIGLU, AGAIN, **FP32, **IN_FLIGHT, ep=2),
    layer("grouped-uneven", GROUPED, CLAMPED_GLU, sequences=(3, 6, 1, 9)),
    layer(
        "grouped-static",
        {"ncclep": EpConfig(experts="grouped", max_recv_rows=512), "num_moe_experts": 6},
        ep=2,
    ),
    layer("grouped-probs-on-input", GROUPED, ON_INPUT),
    layer("grouped-pad-to-capacity", GROUPED, PADDED),
    layer("slices-integers", {"activation_func": F.relu}, **INTEGERS),
    layer("slices-shared-experts", SWIGLU, SHARED_OVERLAP, AUX_LOSS, RECOMPUTE, tp=2, **SLICES),
    # Twice the balanced load is all that can come: one of 4 experts, from 4 ranks.
    layer(
        "slices-static-factor",
        TOP_1,
        {"ncclep": EpConfig(max_recv_rows="2x")},
        tp=2,
        **SLICES,
        **IN_FLIGHT,
    ),
    layer("slices-grouped-integers", GROUPED, {"activation_func": F.relu}, **INTEGERS),
    layer("slices-grouped-swiglu", GROUPED, SWIGLU, tp=2, **SLICES),
    layer("slices-uneven", **SLICES, sequences=(3, 6, 1, 9)),
    layer("slices-on-all-ranks", ep=1, etp=4, tp=2),
    layer("slices-of-fewer-ranks", ep=2, etp=2, tp=4, sequences=(8,) * 4),
]


# Cases with the same groups one after the other: making groups takes longer than most cases.
@pytest.mark.supports(compared="outputs and all gradients with alltoall's, within rounding")
@pytest.mark.parametrize("case", sorted(CASES, key=lambda c: (c.ep, c.tp, c.etp)), ids=str)
def test_layer_equals_alltoall(ctx: RankContext, case: LayerCase) -> None:
    assert_same_training(ctx, case, "reference")


def over_machines(name: str, *options: dict[str, Any], **fields: Any) -> LayerCase:
    """A layer for four ranks that count as two machines with two each."""
    case = layer(f"machines-{name}", {"ncclep": EpConfig()}, *options, **{**FP32, **fields})
    case.options["ncclep"] = replace(case.options["ncclep"], engine="hierarchical")
    return case


WORST = EpConfig(experts="grouped", max_recv_rows="worst")
MACHINES = [
    over_machines("uneven", sequences=(3, 6, 1, 9)),
    over_machines(
        "top-6-bf16-chunks", {"moe_router_topk": 6, "ncclep": EpConfig(network_chunks=3)}, **BF16
    ),
    over_machines("grouped-static", SWIGLU, {"ncclep": WORST}, **IN_FLIGHT),
    # Slices of an expert are on one machine.
    over_machines("slices-shared-overlap", SHARED_OVERLAP, tp=2, **SLICES),
]


@pytest.mark.parametrize("case", MACHINES, ids=str)
def test_layer_over_machines_equals_alltoall(ctx: RankContext, case: LayerCase) -> None:
    with mock.patch.dict(os.environ, NCCLEP_LOCAL_RANKS="2"):
        assert_same_training(ctx, case, "hierarchical")


def overflow_on_rank(ctx: RankContext, more: dict[str, Any]) -> tuple[int, int]:
    """Train a layer that lacks rows: how many this rank dropped, and how often it warned of it."""
    layer = new_layer(4, ncclep=EpConfig(max_recv_rows=8), **more)
    plans = mock.Mock(wraps=layer.token_dispatcher.engine.plan)
    layer.token_dispatcher.engine.plan = plans
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    with mock.patch.object(logging.getLogger("megatron_ncclep"), "handle") as said:
        for _ in range(2):
            out, _ = layer(hidden)
            out.sum().backward()
        assert not said.mock_calls  # nothing waits for it
        megatron_ncclep.check()
    assert plans.call_count == (4 if more else 2)  # a recomputed dispatch is planned again
    assert torch.isfinite(hidden.grad).all()
    texts = [call.args[0].getMessage() for call in said.mock_calls]
    warnings = sum("did not fit into max_recv_rows=8" in text for text in texts)
    return int(layer.token_dispatcher.num_dropped), warnings


def test_static_overflow_is_counted(ctx: RankContext) -> None:
    dropped, warnings = overflow_on_rank(ctx, {})
    assert warnings == (dropped > 0)
    # 4 ranks x 12 tokens x 2 assignments = 96 rows for 4 x 8 places, twice.
    assert sum(gathered(ctx, dropped)) >= 2 * (96 - 32)
    # A layer that is recomputed counts them once.
    assert overflow_on_rank(ctx, RECOMPUTE)[0] == dropped


def test_slices_make_no_more_room_than_can_be_needed(ctx: RankContext) -> None:
    """A token has 4 assignments (top-2, 2 slices), 2 for each half of the ranks: 2 rows at most."""
    initialize(tp=2, **SLICES)
    options = {"expert_tensor_parallel_size": 2, "ncclep": EpConfig(max_recv_rows="worst")}
    layer = build_layer(make_config("ncclep", torch.float32, 2, 2, **options))
    rows: list[int] = []
    layer.experts.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    layer(torch.randn(SEQUENCE // 2, BATCH, HIDDEN))
    assert rows[0] == 4 * 6 * 2
