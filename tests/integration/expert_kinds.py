"""Kinds of experts that some releases have: what test_hook_points.py checks of them, with each.

A process of its own runs it after hooked_core.py, which has set up its only rank.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import megatron.core
import megatron.core.transformer.moe.moe_layer as layer_module
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ncclep import EpConfig


def make_config(dispatcher, **options):
    return TransformerConfig(
        moe_token_dispatcher_type=dispatcher,
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2,
        add_bias_linear=False,
        use_cpu_initialization=True,
        **options,
    )


def build_layer(config, moe_grouped_gemm=False):
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=moe_grouped_gemm).submodules.mlp
    # A ModuleSpec in old versions, a functools.partial of MoELayer in new ones.
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    return layer_module.MoELayer(config, submodules=submodules, layer_number=1)


def check_layers_that_generate():
    """transformer_impl='inference_optimized': training goes through our dispatcher.

    From 0.18 on every forward pass begins with Megatron's choice of a dispatcher, which was the one
    that it had built itself: a layer trained with `alltoall` and said nothing.
    """
    config = make_config("ncclep")
    # After validation, which wants TransformerEngine's modules.
    config.transformer_impl = "inference_optimized"
    config.inference_grouped_gemm_backend = "torch"
    config.inference_moe_token_dispatcher_type = "nccl"
    layer = build_layer(config)
    ours = layer.token_dispatcher
    plan = ours.engine.plan = Mock(wraps=ours.engine.plan)
    hidden = torch.randn(4, 1, config.hidden_size, requires_grad=True)
    layer(hidden)[0].sum().backward()
    assert plan.call_count == 1
    assert layer.token_dispatcher is ours


def check_legacy_experts():
    """0.16's experts over the package grouped_gemm, with a product of ours in its place: which
    wants what the package's wants, numbers of rows on the CPU that add up and are not all zero.

    The package itself is built where there is a GPU only, whose capability its set-up asks for.
    """
    if not hasattr(experts, "GroupedMLP"):
        assert not megatron.core.__version__.startswith("0.16")
        return
    calls = []

    def gmm(rows, weights, counts, trans_b):
        assert (counts.dtype, counts.device.type) == (torch.int64, "cpu")
        assert counts.sum() == len(rows) > 0
        assert rows.dtype == weights.dtype == torch.bfloat16
        assert rows.is_contiguous()
        calls.append(counts)
        parts = zip(rows.split(counts.tolist()), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])

    results = {}
    package = SimpleNamespace(
        ops=SimpleNamespace(gmm=gmm), assert_grouped_gemm_is_available=lambda: None
    )
    for name, options in (
        ("alltoall", {}),
        ("ncclep", {}),
        ("static", {"ncclep": EpConfig(max_recv_rows=64, alignment=16)}),
    ):
        torch.manual_seed(1)
        dispatcher = "alltoall" if name == "alltoall" else "ncclep"
        config = make_config(dispatcher, bf16=True, params_dtype=torch.bfloat16, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "gg", package)
            layer = build_layer(config, moe_grouped_gemm=True)
            assert type(layer.experts) is experts.GroupedMLP
            hidden = torch.randn(6, 1, config.hidden_size).bfloat16().requires_grad_()
            out, _ = layer(hidden)
            out.sum().backward()
        results[name] = [out, hidden.grad, *(p.grad for p in layer.parameters())]
    assert len(calls) == 6
    for mine, theirs in zip(results["ncclep"], results["alltoall"], strict=True):
        assert torch.equal(mine, theirs)
    for static, exact in zip(results["static"], results["ncclep"], strict=True):
        torch.testing.assert_close(static, exact)


def check_all():
    """Check what this version has."""
    check_layers_that_generate()
    check_legacy_experts()
