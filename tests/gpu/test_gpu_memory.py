"""What saves memory around our dispatcher, in a GPTModel of TransformerEngine's layers: recompute,
and activations that wait on the host for backward; and a layer that torch compiles.

Losses and gradients are alltoall's, to the bit: with two assignments of a token a sum has two
terms, and experts get the same rows in one order.  Where shared experts overlap with the dispatch
they are so within one rounding of bf16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compile_case import AS_IT_IS, Compiler, assert_compiles
from deselect import needs_te
from megatron_setup import ep_config
from rank_pool import RankContext
from test_gpt_model import full, selective
from trainer import ModelCase, differences, train

# Rows and activations of a layer have more than 256 K elements, the least that is offloaded.
SEQUENCE, HIDDEN = 512, 512
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": HIDDEN,
    "moe_ffn_hidden_size": HIDDEN // 2,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": True,
    "moe_grouped_gemm": True,
    "gradient_accumulation_fusion": True,
    "use_cpu_initialization": False,
}


def saving(name: str, options: dict[str, Any]) -> ModelCase:
    """A training that saves memory."""
    how = {"te": True, "sequence": SEQUENCE, "micro_batches": 3, "evaluates": False}
    return ModelCase(name, options, SIZES, dtype=torch.bfloat16, **how)


def offloaded(*modules: str) -> dict[str, Any]:
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
        "min_offloaded_tensor_size": 1024,
    }


SHARED = {"moe_shared_expert_intermediate_size": 256}
# Options that make another model or name its weights otherwise: alltoall has them, too.
MODELLED = (*SHARED, "use_transformer_engine_op_fuser")
# With TransformerEngine's layers the norm is a part of the linear layer, and offloads with it.
ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
CASES = [
    saving("recompute", selective("moe", "layernorm")),
    saving("recompute-parts", {**SHARED, **selective("moe_act", "layernorm", "shared_experts")}),
    # The norm's output, which shared experts read on a stream of their own, is freed.
    saving(
        "recompute-beside",
        {**SHARED, **selective("moe_act", "layernorm"), "moe_shared_expert_overlap": True},
    ),
    saving("recompute-all", full("uniform")),
    # The rows that dispatch delivers are freed as soon as they are on the host.
    saving("offload", offloaded("expert_fc1", "moe_act", "mlp_norm")),
    saving("offload-attention", offloaded(*ATTENTION)),
    saving("offload-everything", offloaded(*ATTENTION, "mlp_norm", "expert_fc1", "moe_act")),
    # All that experts keep, and the rows of the dispatch, freed before they compute on.
    saving(
        "offload-fused-experts",
        {
            **offloaded(*ATTENTION, "mlp_norm", "fused_group_mlp"),
            "use_transformer_engine_op_fuser": True,
        },
    ),
    saving(
        "offload-and-recompute",
        {**offloaded("expert_fc1", "moe_act"), **selective("moe_act", "layernorm")},
    ),
    saving(
        "cpu-offloading",
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1, "cpu_offloading_weights": False},
    ),
]


@contextmanager
def offloads_counted() -> Iterator[list[int]]:
    """Sizes of what goes to the host, in Megatron's offloading and in TransformerEngine's."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler
    from transformer_engine.pytorch.cpu_offload import OffloadableLayerState

    sizes: list[int] = []
    offload, start = ChunkOffloadHandler.offload, OffloadableLayerState.start_offload

    def offload_one(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return offload(self, tensor, *args, **kwargs)

    def start_layer(self: Any) -> None:
        start(self)
        sizes.append(int(2**20 * self.get_offloaded_total_size_mb()))

    with ExitStack() as stack:
        for owner, name, spy in (
            (ChunkOffloadHandler, "offload", offload_one),
            (OffloadableLayerState, "start_offload", start_layer),
        ):
            stack.enter_context(mock.patch.object(owner, name, spy))
        yield sizes


@needs_te
@pytest.mark.supports(
    compared="losses and gradients of a training of TransformerEngine's layers with alltoall's, to "
    "the bit"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_alltoalls(ctx: RankContext, engine_name: str, case: ModelCase) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it would compile takes longer than all the rest
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # the op fuser asks for it
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )
    from megatron.core.transformer.enums import AttnBackend

    # The others add up in whatever order their blocks come, run by run.
    sizes = {**case.sizes, "attention_backend": AttnBackend.unfused}
    case = replace(case, ep=ctx.num_ranks, sizes=sizes)

    def trained(dispatcher: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        PipelineOffloadManager.reset_instance()  # it has learnt what the last model offloads
        options = {**options, "ncclep": ep_config(engine_name)}
        return train(ctx, dispatcher, replace(case, options=options))

    modelled = {name: case.options[name] for name in MODELLED if name in case.options}
    expected = trained("alltoall", modelled)
    with offloads_counted() as counts:
        found = trained("ncclep", case.options)
    # Shared experts beside the dispatch add their part of a norm's gradient in another order.
    one_rounding = 2.0**-8 if case.options.get("moe_shared_expert_overlap") else 0.0
    different = differences(found, expected, one_rounding)
    assert different == [], different
    assert bool(sum(counts)) == ("offload" in case.name), "elements or bytes went to the host"


# torch's own compiler keeps in fp32 what eager rounds between operations, and adds in other orders:
# off by some roundings of the dtype; a wrong row is off by 0.1 and more of the largest value.
INDUCTOR_FP32 = Compiler(inductor=True, dtype=torch.float32, bound=1e-4)
INDUCTOR_BF16 = Compiler(inductor=True, dtype=torch.bfloat16, bound=3e-2)
STATIC = {"ncclep": {"experts": "grouped", "max_recv_rows": "worst"}}


@pytest.mark.parametrize(
    ("options", "compiler"),
    [
        (selective("moe"), AS_IT_IS),
        (STATIC, AS_IT_IS),
        (selective("moe"), INDUCTOR_FP32),
        (STATIC, INDUCTOR_BF16),
    ],
    ids=["exact", "static", "exact-inductor", "static-inductor"],
)
def test_compiled_layer(
    ctx: RankContext, engine_name: str, options: dict[str, Any], compiler: Compiler
) -> None:
    ncclep = ep_config(engine_name, **options.get("ncclep", {}))
    # Few experts, so that each has two rows or more: none and one are compiled apart.
    few = {"num_moe_experts": 2 * ctx.num_ranks}
    assert_compiles(ctx, {**options, **few, "ncclep": ncclep}, compiler)
