"""Kinds of experts that not every release has, and how each is passed its numbers of rows."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from adapter_libraries import TEGroupedLinear
from megatron_setup import SWIGLU, build_layer, drawn, initialize, make_config
from rank_pool import RankContext
from trainer import differences

from megatron_ncclep import EpConfig

pytestmark = [pytest.mark.alone, pytest.mark.each_release]


def test_how_experts_take_the_counts(ctx: RankContext) -> None:
    initialize(ep=1)
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.transformer_config import TransformerConfig

    for attribute, expected in (
        ("nothing", (False, True)),
        ("takes_counts_on_device", (True, False)),
        ("_with_fused_impl", (True, True)),
        ("_use_grouped_tensor", (True, True)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts.SequentialMLP, attribute, True, raising=False)
            layer = build_layer(make_config("ncclep", torch.float32, 1))
        dispatcher = layer.token_dispatcher
        assert (dispatcher._counts_on_device, dispatcher._counts_cover_all_rows) == expected
    # Megatron's own experts that take them on the device say so with this attribute.
    source = inspect.getsource(experts.TEGroupedMLP.forward)
    has_fuser = "use_transformer_engine_op_fuser" in TransformerConfig.__dataclass_fields__
    assert ("if self._with_fused_impl:" in source) == has_fuser


@pytest.mark.since("0.20")
@pytest.mark.supports(
    "moe_use_grouped_tensor",
    compared="outputs and all gradients with alltoall's without it, 1e-12 (fp64), over a stand-in "
    "for the products; that the experts pad no rows",
)
def test_grouped_tensors(ctx: RankContext) -> None:
    """Megatron's experts padded bf16 rows to 256 by numbers that they read on the host, unless the
    dispatcher was one of Megatron's own that does it: no graph, and two copies each way.
    """
    results = []
    for kind, fields in (("alltoall", {}), ("ncclep", {}), ("ncclep", {"max_recv_rows": 4096})):
        initialize(ep=1)
        from megatron.core.transformer.moe import experts

        is_ours = kind == "ncclep"
        options = {**SWIGLU, "moe_grouped_gemm": True, "moe_use_grouped_tensor": is_ours}
        ncclep = EpConfig(engine="reference", **fields)  # experts="auto"
        config = make_config(kind, torch.float64, 1, ncclep=ncclep, **options)
        padding = Mock(return_value=Mock(side_effect=AssertionError("the experts pad rows")))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("HAVE_TE", True), ("Fp8Padding", padding)):
                patch.setattr(experts, name, value)
            patch.setattr(experts, "Fp8Unpadding", padding)
            layer = build_layer(config, linears=TEGroupedLinear)
        given: list[Any] = []
        layer.experts.linear_fc1.register_forward_pre_hook(lambda _, args, g=given: g.append(args))
        hidden, probe = drawn(7, 2, 6, 2, config.hidden_size).double()
        out, _ = layer(hidden.requires_grad_())
        (out * probe).sum().backward()
        assert padding.called == is_ours
        (rows, counts), *_ = given
        assert isinstance(counts, torch.Tensor if is_ours else list)
        if is_ours:
            assert int(counts.sum()) == len(rows) == fields.get("max_recv_rows", len(rows))
            assert not (counts % 256).any()
        gradients = {name: weight.grad for name, weight in layer.named_parameters()}
        results.append({"output": out.detach(), "input": hidden.grad, **gradients})
    for found in results[1:]:
        assert differences(found, results[0], 1e-12) == []
