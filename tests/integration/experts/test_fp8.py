"""Experts that compute in FP8: who pads which rows, and what is refused.

On a CPU nothing is quantised, but all that Megatron does around it is done.  What comes out of FP8
is compared in tests/gpu/test_fp8_training.py.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_setup import HIDDEN, build_layer, drawn, initialize, make_config
from rank_pool import RankContext

from megatron_ncclep import EpConfig
from megatron_ncclep.errors import EpError, UnsupportedError
from megatron_ncclep.integration.checks.fp8 import align_for_experts
from megatron_ncclep.integration.experts.layer_experts import need_no_host

pytestmark = pytest.mark.each_release

PLAIN = EpConfig(engine="reference")
FP8, HYBRID, FP4 = {"fp8": "e4m3"}, {"fp8": "hybrid"}, {"fp4": "e2m1"}
BLOCKWISE, MXFP8 = ({**FP8, "fp8_recipe": recipe} for recipe in ("blockwise", "mxfp8"))
# Options of Megatron's and of ours, and the alignment of blocks that follows.
ALIGNMENTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 1),
    (HYBRID, {}, 16),  # delayed
    ({**HYBRID, "fp8_recipe": "tensorwise"}, {}, 16),
    (BLOCKWISE, {}, 16),
    (MXFP8, {}, 32),
    (FP4, {}, 128),
    (FP8, {"alignment": 128}, 128),
    (FP8, {"max_recv_rows": 64}, 16),
    (FP8, {"max_recv_rows": "worst"}, 16),
    (FP8, {"experts": "auto"}, 16),
]
FUSED: Any = ({**FP8, "use_transformer_engine_op_fuser": True}, {}, 256)
NO_PRODUCTS = "has no GEMMs for this format, with any dispatcher: TransformerEngine needs"
NEEDS = "{}: experts with fp8='e4m3', fp8_recipe='{}' need blocks of a multiple of {} rows: leave "
LEAVE_OUT = r"it out \(--ncclep-alignment\), or set it to {} or more"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (MXFP8, {"alignment": 16}, NEEDS.format(16, "mxfp8", 32) + LEAVE_OUT.format(32)),
    # It looked like the default, and was raised silently.
    (FP8, {"alignment": 1}, NEEDS.format(1, "delayed", 16) + LEAVE_OUT.format(16)),
    (
        FP8,
        {"max_recv_rows": 40},
        "fp8_recipe='delayed' sets the alignment to 16: max_recv_rows 40: must be a multiple",
    ),
]


def config_with(ncclep: EpConfig | None, options: dict[str, Any], **more: Any) -> Any:
    """A config with `options` set after validation, which asks for TransformerEngine with them."""
    dispatcher = "alltoall" if ncclep is None else "ncclep"
    config = make_config(dispatcher, torch.float32, 1, ncclep=ncclep, **more)
    for name, value in options.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


def test_blocks_are_as_experts_need_them(ctx: RankContext) -> None:
    """And the log says so, once."""
    initialize(ep=1)
    import megatron.core

    # Before 0.18 its experts know nothing of FP8.
    is_old = megatron.core.__version__.startswith(("0.16", "0.17"))
    for options, ours, alignment in [*ALIGNMENTS, *([] if is_old else [FUSED])]:
        ncclep = dataclasses.replace(PLAIN, **ours)
        engine = build_layer(config_with(ncclep, options)).token_dispatcher.engine
        aligned = {"alignment": engine.config.alignment, "experts": "megatron"}
        assert engine.config == dataclasses.replace(ncclep, **aligned), options
        assert engine.config.block_alignment == alignment, options
    with mock.patch.object(logging.getLogger("megatron_ncclep"), "log") as log:
        for _ in range(2):
            build_layer(config_with(PLAIN, {**HYBRID, "fp8_recipe": "custom"}))
    said = "fp8='hybrid', fp8_recipe='custom': dispatch pads expert blocks to a multiple of 16 rows"
    assert [said in call.args[1] for call in log.mock_calls].count(True) == 1


@pytest.mark.refuses(
    "fp8_recipe=mxfp8",
    "fp4",
    words=f"on GPUs before compute capability 10.0: such a GPU {NO_PRODUCTS}"
    " 10.0 or newer; use fp8 with fp8_recipe 'blockwise', 'tensorwise' or 'delayed'",
)
def test_what_cannot_be_says_why(ctx: RankContext) -> None:
    initialize(ep=1)
    for options, ours, words in REFUSED:
        config = config_with(EpConfig(engine="reference", **ours), options)
        with pytest.raises(EpError, match=words):
            build_layer(config)

    # On a GPU that has no such products; on one that has them, and for a recipe that needs none.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for capability in ((9, 0), (10, 0)):
            patch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
            align_for_experts(config_with(PLAIN, BLOCKWISE), PLAIN)
            for name, config in (
                ("fp8", config_with(PLAIN, MXFP8)),
                ("fp4", config_with(PLAIN, FP4)),
            ):
                if capability >= (10, 0):
                    align_for_experts(config, PLAIN)
                    continue
                words = (
                    f"^{name}='e.m.', {name}_recipe='.*9\\.0 {NO_PRODUCTS}.*use fp8 with fp8_rec"
                )
                with pytest.raises(UnsupportedError, match=words):
                    align_for_experts(config, PLAIN)


def test_quantised_experts_need_the_host(ctx: RankContext) -> None:
    """They read how many rows they have, whatever TransformerEngine's kernels can do: no CUDA graph
    can hold them.
    """
    initialize(ep=1)
    from megatron.core.transformer.moe.experts import SequentialMLP

    config = config_with(PLAIN, FP8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequentialMLP, "_with_fused_impl", True, raising=False)
        assert not need_no_host(build_layer(config).experts, config)


def train(ncclep: EpConfig | None, options: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """A micro-batch through one MoE layer: results, and what its experts were given."""
    initialize(ep=1)  # the same random numbers
    sizes: dict[str, Any] = {"num_moe_experts": num_experts}
    if num_experts == 1:
        sizes |= {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    layer = build_layer(config_with(ncclep, options, **sizes))
    seen: dict[str, Any] = {"copies": 0}
    pad = layer.experts._pad_tensor_for_quantization

    def watch(hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        padded = pad(hidden, probs)
        seen["copies"] += padded[0] is not hidden
        return padded

    layer.experts._pad_tensor_for_quantization = watch
    layer.experts.register_forward_pre_hook(lambda module, inputs: seen.update(given=inputs))
    # 5 tokens with two experts each: some experts get fewer rows than others.
    hidden, probe = drawn(7, 2, 5, 1, HIDDEN)
    out, _ = layer(hidden.requires_grad_())
    (out * probe).sum().backward()
    seen["results"] = {"output": out.detach(), "input gradient": hidden.grad}
    for name, parameter in layer.named_parameters():  # of an expert without rows None, or zeros
        seen["results"][name] = torch.zeros(()) if parameter.grad is None else parameter.grad
    return seen


@pytest.mark.supports(
    "fp8",
    "moe_router_padding_for_quantization",
    compared="outputs and all gradients with alltoall's, to the bit; nothing is quantised on a CPU",
)
def test_experts_pad_no_rows(ctx: RankContext) -> None:
    """With and without the router's option, in exact and in static mode.

    To the bit: the experts have the same rows at the same places, and each token adds up two.
    """
    for num_experts in (4, 1):
        theirs = train(None, HYBRID, num_experts)
        assert theirs["copies"] > 0  # the way that this looks for copies finds some
        for option in ({}, {"moe_router_padding_for_quantization": True}):
            for rows in (None, 96):
                what = f"{num_experts} experts, {option}, {rows} rows"
                ncclep = dataclasses.replace(PLAIN, max_recv_rows=rows)
                ours = train(ncclep, {**HYBRID, **option}, num_experts)
                assert ours["copies"] == 0, what
                given, counts, probs = ours["given"]
                assert counts.device.type == "cpu"
                assert all(count % 16 == 0 for count in counts.tolist()), what
                assert int(counts.sum()) == len(given) == len(probs) == (rows or len(given)), what
                # What fills blocks up is zero; no token travels that an expert was not chosen for.
                assert int(given.any(dim=1).sum()) == 5 * min(2, num_experts), what
                assert not probs[~given.any(dim=1)].any(), what
                if rows is not None:
                    continue  # the last expert's product has more rows: its sums may be others
                assert ours["results"].keys() == theirs["results"].keys()
                for name, mine in ours["results"].items():
                    other = theirs["results"][name]
                    assert torch.equal(*torch.broadcast_tensors(mine, other)), f"{what}: {name}"
