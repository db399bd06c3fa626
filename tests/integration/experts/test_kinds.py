"""Kinds of experts that not every release has, and how each is passed its numbers of rows."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron_setup import build_layer, initialize, make_config

from megatron_ncclep.ranks.pool import RankContext

pytestmark = [pytest.mark.alone, pytest.mark.each_release]


def test_how_experts_take_the_counts(ctx: RankContext) -> None:
    initialize(ep=1)
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.transformer_config import TransformerConfig

    for attribute, expected in (
        (None, (False, True)),
        ("takes_counts_on_device", (True, False)),
        ("_with_fused_impl", (True, True)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if attribute is not None:
                patch.setattr(experts.SequentialMLP, attribute, True, raising=False)
            layer = build_layer(make_config("ncclep", torch.float32, 1))
        dispatcher = layer.token_dispatcher
        assert (dispatcher._counts_on_device, dispatcher._counts_add_up) == expected
    # Megatron's own experts that take them on the device say so with this attribute.
    source = inspect.getsource(experts.TEGroupedMLP.forward)
    has_fuser = "use_transformer_engine_op_fuser" in TransformerConfig.__dataclass_fields__
    assert ("if self._with_fused_impl:" in source) == has_fuser
