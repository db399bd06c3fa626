"""Every kind of TransformerEngine's experts against `alltoall`, in bf16: outputs and all gradients.

To the bit: with two assignments of a token a sum has two terms, and experts get the same rows in
one order.  Only in static mode the last expert computes more rows, which are zero, and a GEMM of
another size may add up in another order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deselect import needs_te
from layer_case import LayerCase, assert_same_training, options_shown, train_on_rank
from megatron_setup import ep_config
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig

pytestmark = needs_te

OPTIONS: dict[str, Any] = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 128,
    "num_moe_experts": 16,
    "moe_grouped_gemm": True,
    "use_cpu_initialization": False,
}
SWIGLU: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "bias_activation_fusion": True,
}
SQUARED_RELU = {"activation_func": "squared_relu", "use_fused_weighted_squared_relu": True}
GPT_OSS: dict[str, Any] = {
    **SWIGLU,
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    # Megatron's router has a bias then, too, in bf16: with a router in fp32 TransformerEngine's
    # product makes something else of the same values each time, whatever the dispatcher.
    "moe_router_dtype": None,
}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
FUSER = {**SWIGLU, "use_transformer_engine_op_fuser": True}
GROUPED_TENSORS = {**SWIGLU, "moe_use_grouped_tensor": True}
INFERENCE: dict[str, Any] = {
    **SQUARED_RELU,
    "transformer_impl": "inference_optimized",
    "normalization": "RMSNorm",
    "inference_grouped_gemm_backend": "torch",
    "inference_moe_token_dispatcher_type": "nccl",
}


@dataclass(frozen=True)
class Experts:
    """A kind of them: TransformerConfig fields, where a string names one of Megatron's activations;
    and fields of EpConfig.  Fields for inference are there to be accepted: training ignores them.
    """

    name: str
    options: dict[str, Any]
    ncclep: dict[str, Any] = field(default_factory=dict)
    since: str = "0.16"

    def __str__(self) -> str:
        return self.name

    @property
    def same_bits(self) -> bool:
        return not self.ncclep

    def options_shown(self) -> list[str]:
        fields = {**self.options, "ncclep": EpConfig(**self.ncclep), "moe_grouped_gemm": True}
        if not self.options.get("moe_grouped_gemm", True):
            del fields["moe_grouped_gemm"]
        return [name for name in options_shown(fields) if not name.startswith("inference_")]


STATIC: dict[str, Any] = {"max_recv_rows": "worst"}
KINDS = [
    Experts("grouped", SWIGLU),
    Experts("grouped-static", SWIGLU, STATIC),
    Experts("unfused", {**SWIGLU, "bias_activation_fusion": False}),
    Experts("kept-in-fp8", {**SWIGLU, "activation_func_fp8_input_store": True}),
    Experts("gpt-oss", GPT_OSS),
    Experts("squared-relu", SQUARED_RELU),
    Experts(
        "te-activation", {**SWIGLU, "bias_activation_fusion": False, "use_te_activation_func": True}
    ),
    Experts("probs-on-input", {**SWIGLU, **TOP_1, "moe_apply_probs_on_input": True}),
    Experts(
        "recomputed-activation",
        {**SWIGLU, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    ),
    # With biases Megatron adds to what is a view to autograd, and no dispatcher can train them.
    Experts("one-by-one", {**SWIGLU, "moe_grouped_gemm": False}),
    Experts("op-fuser", FUSER),
    Experts("op-fuser-static", FUSER, STATIC),
    Experts("op-fuser-gpt-oss", {**GPT_OSS, "use_transformer_engine_op_fuser": True}),
    Experts("grouped-tensors", GROUPED_TENSORS, since="0.20"),
    Experts("grouped-tensors-static", GROUPED_TENSORS, STATIC, since="0.20"),
    Experts("inference", INFERENCE),
]


def prepare_on_rank(ctx: RankContext) -> None:
    """Before anything of Megatron is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it would compile takes longer than all the rest
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # the op fuser asks for it


def train_kind_on_rank(ctx: RankContext, case: LayerCase, dispatcher: str) -> dict[str, Any]:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    named = {"quick_gelu": quick_gelu, "squared_relu": squared_relu}
    function = case.options["activation_func"]
    case.options["activation_func"] = named.get(function, function)
    return train_on_rank(ctx, case, dispatcher)


@pytest.mark.supports(
    compared="outputs and all gradients of TransformerEngine's experts with alltoall's, to the "
    "bit; in static mode within rounding"
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.since(kind.since)) for kind in KINDS], ids=str
)
def test_experts_equal_alltoall(ctx: RankContext, engine_name: str, kind: Experts) -> None:
    prepare_on_rank(ctx)
    ncclep = ep_config(engine_name, **kind.ncclep)
    case = LayerCase(
        kind.name,
        ep=ctx.num_ranks,
        dtype=torch.bfloat16,
        options={**OPTIONS, **kind.options, "ncclep": ncclep},
        micro_batches=2,
        in_flight=True,
        same_bits=kind.same_bits,
        te=True,
        sequences=(64,) * ctx.num_ranks,
    )
    assert_same_training(ctx, case, engine_name, train_kind_on_rank)
