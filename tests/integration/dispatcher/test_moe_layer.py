"""A whole MoELayer with our dispatcher against Megatron's `alltoall`: outputs and all gradients.

Shapes of batches and more routers: test_shapes.py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from layer_case import LayerCase, assert_same_training
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from on_ranks import gathered
from rank_pool import RankContext

import megatron_ncclep
from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
CAPACITY = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
GROUPED = {"ncclep": EpConfig(experts="grouped")}
SHARED_OVERLAP = {
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_overlap": True,
}
EXPERT_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True}

SLICES = {"ep": 2, "etp": 2}  # experts in two slices


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
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

CASES = [
    LayerCase("top-6", options={"moe_router_topk": 6}),
    LayerCase("bf16", dtype=torch.bfloat16, options={"moe_router_topk": 4}),
    LayerCase("bf16-router-too", dtype=torch.bfloat16, options={"moe_router_dtype": None}),
    LayerCase(
        "sinkhorn", options={"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1}
    ),
    LayerCase("groups", options={"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    LayerCase("shared-overlap", options=SHARED_OVERLAP, micro_batches=2, in_flight=True),
    LayerCase("shared-overlap-tp2", tp=2, options=SHARED_OVERLAP),
    LayerCase(
        "shared-overlap-recompute",
        options={
            **SHARED_OVERLAP,
            **RECOMPUTE,
            "ncclep": EpConfig(max_recv_rows="worst", alignment=16),
        },
        micro_batches=2,
    ),
    LayerCase("expert-bias", options=EXPERT_BIAS),
    LayerCase("probs-on-input", options={**TOP_1, "moe_apply_probs_on_input": True}),
    LayerCase(
        "recompute-shared-experts",
        options={
            **RECOMPUTE,
            "recompute_modules": ["shared_experts", "moe"],
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
        },
        micro_batches=2,
        in_flight=True,
        same_bits=True,
    ),
    LayerCase(
        "swiglu",
        dtype=torch.bfloat16,
        options={**SWIGLU, "bias_activation_fusion": False},
        same_bits=True,
    ),
    LayerCase(
        "swiglu-kept-in-fp8",
        dtype=torch.bfloat16,
        options={**SWIGLU, "activation_func_fp8_input_store": True},
        same_bits=True,
    ),
    LayerCase("squared-relu", options={"activation_func": squared_relu}, same_bits=True),
    LayerCase(
        "biased-clamped-glu", options=CLAMPED_GLU | {"add_bias_linear": True}, same_bits=True
    ),
    # Rows of padding would add to the biases' gradients, had they any weight.
    LayerCase(
        "biased-static",
        options={"add_bias_linear": True, "ncclep": EpConfig(max_recv_rows="worst", alignment=16)},
        micro_batches=2,
    ),
    LayerCase("aligned", options={"ncclep": EpConfig(alignment=32)}),
    LayerCase("grouped-swiglu", ep=2, dtype=torch.float32, options={**GROUPED, **SWIGLU}),
    LayerCase(
        "grouped-bf16",
        dtype=torch.bfloat16,
        options={**GROUPED, **SWIGLU, "activation_func_clamp_value": 0.2},
    ),
    LayerCase(
        "grouped-swiglu-again",
        ep=2,
        dtype=torch.float32,
        options={
            **GROUPED,
            **SWIGLU,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act"],
            "moe_grouped_gemm": True,  # Megatron wants it for moe_act
        },
        micro_batches=2,
        in_flight=True,
    ),
    LayerCase("grouped-uneven", options={**GROUPED, **CLAMPED_GLU}, sequences=(3, 6, 1, 9)),
    LayerCase(
        "grouped-static",
        ep=2,
        options={"ncclep": EpConfig(experts="grouped", max_recv_rows=512), "num_moe_experts": 6},
    ),
    LayerCase(
        "grouped-probs-on-input", options={**GROUPED, **TOP_1, "moe_apply_probs_on_input": True}
    ),
    LayerCase(
        "grouped-pad-to-capacity",
        options={**GROUPED, **CAPACITY, "moe_pad_expert_input_to_capacity": True},
    ),
    LayerCase(
        "slices-integers",
        tp=2,
        **SLICES,
        dtype=torch.bfloat16,
        options={"activation_func": F.relu},
        integers=True,
    ),
    LayerCase(
        "slices-shared-experts",
        tp=2,
        **SLICES,
        options={
            **SWIGLU,
            **SHARED_OVERLAP,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.1,
            **RECOMPUTE,
        },
    ),
    # Twice the balanced load is all that can come: one of 4 experts, from 4 ranks.
    LayerCase(
        "slices-static-factor",
        tp=2,
        **SLICES,
        options={**TOP_1, "ncclep": EpConfig(max_recv_rows="2x")},
        micro_batches=2,
        in_flight=True,
    ),
    LayerCase(
        "slices-grouped-integers",
        tp=2,
        **SLICES,
        dtype=torch.bfloat16,
        options={**GROUPED, "activation_func": F.relu},
        integers=True,
    ),
    LayerCase("slices-grouped-swiglu", tp=2, **SLICES, options={**GROUPED, **SWIGLU}),
    LayerCase("slices-uneven", **SLICES, sequences=(3, 6, 1, 9)),
    LayerCase("slices-on-all-ranks", ep=1, etp=4, tp=2),
    LayerCase("slices-of-fewer-ranks", ep=2, etp=2, tp=4, sequences=(8,) * 4),
]


# Cases with the same groups one after the other: making groups takes longer than most cases.
@pytest.mark.supports(compared="outputs and all gradients with alltoall's, within rounding")
@pytest.mark.parametrize("case", sorted(CASES, key=lambda c: (c.ep, c.tp, c.etp)), ids=str)
def test_layer_equals_alltoall(ctx: RankContext, case: LayerCase) -> None:
    assert_same_training(ctx, case, "reference")


def over_machines(name: str, **changes: Any) -> LayerCase:
    """A layer for four ranks that count as two machines with two each."""
    engine, options = changes.pop("ncclep", {}), changes.pop("options", {})
    options = {**options, "ncclep": EpConfig(engine="hierarchical", **engine)}
    case = LayerCase(f"machines-{name}", dtype=torch.float32, options=options)
    return dataclasses.replace(case, **changes)


MACHINES = [
    over_machines("uneven", sequences=(3, 6, 1, 9)),
    over_machines(
        "top-6-bf16-chunks",
        dtype=torch.bfloat16,
        ncclep={"network_chunks": 3},
        options={"moe_router_topk": 6},
    ),
    over_machines(
        "grouped-static",
        ncclep={"experts": "grouped", "max_recv_rows": "worst"},
        options=SWIGLU,
        micro_batches=2,
        in_flight=True,
    ),
    # Slices of an expert are on one machine.
    over_machines("slices-shared-overlap", options=SHARED_OVERLAP, tp=2, **SLICES),
]


@pytest.mark.parametrize("case", MACHINES, ids=str)
def test_layer_over_machines_equals_alltoall(ctx: RankContext, case: LayerCase) -> None:
    with mock.patch.dict(os.environ, NCCLEP_LOCAL_RANKS="2"):
        assert_same_training(ctx, case, "hierarchical")


def overflow_on_rank(ctx: RankContext, more: dict[str, Any]) -> tuple[int, int]:
    """Train a layer that lacks rows: how many this rank dropped, and how often it warned of it."""
    initialize(ep=4)
    options = {"ncclep": EpConfig(max_recv_rows=8), **more}
    layer = build_layer(make_config("ncclep", torch.float32, 4, **options))
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
