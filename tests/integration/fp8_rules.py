"""What test_hook_points.py checks of FP8, in the process and release of hooked_core.py.

On a CPU nothing is quantised, but all that Megatron does around it is done: who pads which rows.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
import torch
from graph_rules import build, make_config
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ncclep import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.fp8_support import align_for_experts
from megatron_ncclep.layer_experts import need_no_host

PLAIN = EpConfig(engine="reference")
FIELDS = TransformerConfig.__dataclass_fields__
# What is asked for, the alignment, and the rows that experts need: recipes, then rows asked for.
ALIGNMENTS: list[tuple[dict[str, Any], EpConfig, int]] = [
    ({}, PLAIN, 1),
    ({"fp8": "hybrid"}, PLAIN, 16),  # delayed
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, PLAIN, 16),
    ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, PLAIN, 16),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, PLAIN, 32),
    ({"fp8": "e4m3"}, EpConfig(engine="reference", alignment=128), 128),
    ({"fp8": "e4m3"}, EpConfig(engine="reference", max_recv_rows=64), 16),
    ({"fp8": "e4m3"}, EpConfig(engine="reference", max_recv_rows="worst"), 16),
    ({"fp8": "e4m3"}, EpConfig(engine="reference", experts="auto"), 16),
    *([({"fp4": "e2m1"}, PLAIN, 128)] if "fp4" in FIELDS else []),
]


def config_with(ncclep: EpConfig | None, options: dict[str, Any]) -> Any:
    """A config with options set after validation, which asks for TransformerEngine with them."""
    config = make_config({}, ncclep, moe_shared_expert_intermediate_size=None)
    for name, value in options.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


def check_alignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are as quantised experts need them, and the log says so, once."""
    for options, ncclep, alignment in ALIGNMENTS:
        engine = build(config_with(ncclep, options)).mlp.token_dispatcher.engine
        assert engine.config.alignment == alignment, options
        expected = dataclasses.replace(ncclep, alignment=alignment, experts="megatron")
        assert engine.config == expected, options
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("megatron_ncclep"), "log", lambda level, text: lines.append(text)
    )
    for _ in range(2):
        build(config_with(PLAIN, {"fp8": "hybrid", "fp8_recipe": "custom"}))
    said = "fp8='hybrid', fp8_recipe='custom': experts get blocks of a multiple of 16 rows"
    assert [said in line for line in lines].count(True) == 1, lines


def check_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be says why, and what can be done."""
    aligned = EpConfig(engine="reference", alignment=16)
    refused: list[tuple[dict[str, Any], EpConfig, type[Exception], str]] = [
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
            aligned,
            InputError,
            r"alignment 16: experts with fp8='e4m3', fp8_recipe='mxfp8' need blocks of a multiple "
            r"of 32 rows: leave it out \(--ncclep-alignment\), or ask for 32 or more",
        ),
        (
            {"fp8": "e4m3"},
            EpConfig(engine="reference", max_recv_rows=40),
            InputError,
            "max_recv_rows 40: must be a multiple of the alignment 16",
        ),
        (
            {"fp8": "e4m3"},
            EpConfig(engine="reference", experts="grouped"),
            UnsupportedError,
            "'grouped'.* does not support fp8='e4m3': leave it out: they compute in bf16",
        ),
    ]
    if "use_transformer_engine_op_fuser" in FIELDS:
        fused = {"fp8": "e4m3", "use_transformer_engine_op_fuser": True}
        text = "op_fuser: its kernels want blocks of 256 rows, and 128 is the largest alignment"
        refused.append((fused, PLAIN, UnsupportedError, text))
    for options, ncclep, kind, text in refused:
        with pytest.raises(kind, match=text):
            build(config_with(ncclep, options))

    # On a GPU that has no such products; on one that has them, and for recipes that need none.
    hopper_cannot: list[tuple[dict[str, Any], str]] = [
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "^fp8='e4m3', fp8_recipe='mxfp8': a GPU of"),
        *([({"fp4": "e2m1"}, "^fp4='e2m1', fp4_recipe='nvfp4': a GPU")] if "fp4" in FIELDS else []),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        for options, text in hopper_cannot:
            config = config_with(PLAIN, options)
            if capability == (10, 0):
                align_for_experts(config, PLAIN)
                continue
            with pytest.raises(UnsupportedError, match=text) as caught:
                align_for_experts(config, PLAIN)
            assert re.search(r"9\.0 has no .* use fp8 with fp8_recipe 'block", str(caught.value))
        align_for_experts(config_with(PLAIN, {"fp8": "e4m3", "fp8_recipe": "blockwise"}), PLAIN)


def check_counts_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that pad by them read them, whatever TransformerEngine's kernels could do."""
    monkeypatch.setattr(SequentialMLP, "_with_fused_impl", True, raising=False)
    config = config_with(PLAIN, {"fp8": "e4m3"})
    assert not need_no_host(build(config).mlp.experts, config)


def train(ncclep: EpConfig | None, options: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """A micro-batch through one MoE layer: results, and what its experts were given."""
    config = config_with(ncclep, options)
    config.num_moe_experts = num_experts
    layer = build(config).mlp
    seen: dict[str, Any] = {"copies": 0}
    pad = layer.experts._pad_tensor_for_quantization

    def watch(hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        padded = pad(hidden, probs)
        seen["copies"] += padded[0] is not hidden
        return padded

    layer.experts._pad_tensor_for_quantization = watch
    layer.experts.register_forward_pre_hook(lambda module, inputs: seen.update(given=inputs))
    torch.manual_seed(7)
    # 5 tokens, of which each goes to two experts: some of them get fewer than others.
    hidden, probe = (torch.randn(5, 1, config.hidden_size) for _ in range(2))
    out, _ = layer(hidden.requires_grad_())
    (out * probe).sum().backward()
    seen["results"] = [out.detach(), hidden.grad, *(p.grad for p in layer.parameters())]
    return seen


def check_who_pads() -> None:
    """The experts pad nothing, with and without the router's option; results are `alltoall`'s.

    To the bit: the experts have the same rows at the same places, and each token adds up two.
    """
    for num_experts in (4, 1):
        fp8: dict[str, Any] = {"fp8": "hybrid", "moe_router_topk": min(2, num_experts)}
        theirs = train(None, fp8, num_experts)
        assert theirs["copies"] > 0  # the way that this looks for copies finds some
        for option in ({}, {"moe_router_padding_for_quantization": True}):
            for rows in (None, 96):
                what = f"{num_experts} experts, {option}, {rows} rows"
                ncclep = dataclasses.replace(PLAIN, max_recv_rows=rows)
                ours = train(ncclep, {**fp8, **option}, num_experts)
                assert ours["copies"] == 0, what
                given, counts, probs = ours["given"]
                assert counts.device.type == "cpu"
                assert all(count % 16 == 0 for count in counts.tolist()), what
                assert int(counts.sum()) == len(given) == len(probs) == (rows or len(given)), what
                # What fills blocks up is zero; no token travels that an expert was not chosen for.
                assert int(given.any(dim=1).sum()) == 5 * fp8["moe_router_topk"], what
                assert not probs[~given.any(dim=1)].any(), what
                if rows is not None:
                    continue  # the last expert's product has more rows: its sums may be others
                for mine, other in zip(ours["results"], theirs["results"], strict=True):
                    if mine is None or other is None:
                        assert not any(t is not None and t.any() for t in (mine, other)), what
                        continue
                    assert torch.equal(mine, other), what


def check_all() -> None:
    """Check what every version has; process groups are there."""
    for check in (check_alignments, check_refusals, check_counts_stay_on_the_host):
        with pytest.MonkeyPatch.context() as monkeypatch:
            check(monkeypatch)
    check_who_pads()
