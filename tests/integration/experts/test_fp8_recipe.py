"""Which FP8 grouped experts compute, where they can, and whether a pass is in FP8."""

from __future__ import annotations

import logging
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from adapted_experts import of_bridge, wrap
from megatron_setup import SWIGLU, build_layer, drawn, initialize, make_config, selective
from rank_pool import RankContext
from te_autocast import Float8BlockScaling, State, autocast
from torch_fp8_kernels import TorchFp8Kernels, stand_in

from megatron_ncclep import EpConfig
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.experts import grouped, selection
from megatron_ncclep.integration.experts.fp8_recipe import powers_of_two_in_use, unavailable_reason
from megatron_ncclep.libraries import extension

GPU, CPU, BF16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
GROUPED = EpConfig(engine="reference", experts="grouped")
WIDTH = 256
FP8: dict[str, Any] = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
IN_FP8: dict[str, Any] = {
    **FP8, **SWIGLU, "hidden_size": WIDTH, "moe_ffn_hidden_size": WIDTH, "fp8_param": False
}  # fmt: skip


def config_with(ncclep: EpConfig, ep: int = 1, **options: Any) -> Any:
    """In bf16; what concerns FP8 is set after validation, which asks for TransformerEngine."""
    names = ("fp8", "fp8_recipe", "fp8_param", "fp4", "activation_func_clamp_value",
             "recompute_granularity", "recompute_modules")  # fmt: skip
    later = {name: options.pop(name) for name in names if name in options}
    config = make_config("ncclep", BF16, ep, ncclep=ncclep, **options)
    vars(config).update(later)
    return config


# ---- what is refused

ONLY = r": set fp8='e4m3' and fp8_recipe='blockwise' \(--fp8-format e4m3 --fp8-recipe blockwise\)"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp8": "hybrid"}, "fp8='hybrid', fp8_recipe='blockwise'" + ONLY),
    *(
        ({"fp8_recipe": recipe}, f"fp8='e4m3', fp8_recipe='{recipe}'" + ONLY)
        for recipe in ("delayed", "tensorwise", "mxfp8", "custom")
    ),
    ({"fp8_param": True}, r"fp8_param=True: leave it \(--fp8-param-gather\) out, so that param"),
    ({"activation_func_clamp_value": 7.0}, "fp8='e4m3': activation_func_clamp_value is set, and"),
    ({"hidden_size": 128}, "hidden_size=128 in FP8: it must be a multiple of 256"),
    ({"moe_ffn_hidden_size": 896}, "moe_ffn_hidden_size=896 in FP8: it must be a multiple of 256"),
    (
        {"fp8": None, "fp4": "e2m1"},
        "fp4='e2m1': leave it out, or set fp8='e4m3' and fp8_recipe='blockwise', all that they "
        "compute beside bf16",
    ),
]  # fmt: skip
ALL_ELSE = (
    "FP4, fp8_param, FP8 other than blockwise e4m3, and in FP8 activations other than SwiGLU or "
    "sizes that are no multiples of 256"
)


@pytest.mark.each_release
@pytest.mark.refuses("--ncclep-experts=grouped", words=ALL_ELSE)
def test_what_is_refused(ctx: RankContext) -> None:
    """By name with the remedy; `auto` lets Megatron's experts compute, and says why."""
    initialize(ep=1)
    layer = build_layer(config_with(EpConfig(engine="reference", experts="megatron")))
    for options, words in REFUSED:
        config = config_with(GROUPED, **{**IN_FP8, **options})
        with pytest.raises(UnsupportedError, match=words) as caught:
            build_layer(config)
        assert str(caught.value).endswith("or use Megatron's experts, with experts='megatron'")
        automatic = EpConfig(engine="reference")
        with mock.patch.object(selection, "unavailable_reason", return_value=None):
            choice = selection.choose(config, automatic, layer.experts, 8, 1, False, GPU)
        assert choice.experts == "megatron", options
    # Slices of experts.
    from megatron_ncclep.integration.experts.refusals import config_problem

    config = config_with(GROUPED, **IN_FP8)
    assert config_problem(config, 8, 1) is None
    assert "a multiple of 512, 256 for each of its 2 slices" in str(config_problem(config, 8, 2))
    recipe = Enum("Recipe", {"blockwise": "blockwise"})
    vars(config).update(fp8_recipe=recipe.blockwise)
    assert config_problem(config, 8, 1) is None


# ---- where


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "functions", "words"),
    [
        (GPU, BF16, (9, 0), ["fp8_pack_rows"], None),
        (CPU, BF16, (9, 0), ["fp8_pack_rows"], "FP8 on a CPU: their FP8 products need a GPU"),
        (GPU, BF16, (9, 0), [], "is built for sm_100, without sm_90: install the package again"),
        (GPU, BF16, (10, 0), ["fp8_pack_rows"], "FP8 on NVIDIA B200, of compute capability 10"),
        (GPU, torch.float16, (9, 0), ["fp8_pack_rows"], "in torch.float16: use bf16"),
    ],
)  # fmt: skip
def test_where_they_run(
    device: torch.device, dtype: torch.dtype, capability: tuple[int, int], functions: list[str],
    words: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = SimpleNamespace(
        build_info=lambda: {"architectures": ["sm_100"]}, **dict.fromkeys(functions)
    )
    monkeypatch.setattr(extension, "load", lambda: module)
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA B200")
    found = unavailable_reason(device, dtype)
    assert found is None if words is None else words in str(found)
    if not functions:  # of an earlier build
        module.build_info = lambda: {"architectures": ["sm_90", "sm_100"]}
        assert "the extension is older than this code" in str(unavailable_reason(device, dtype))
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "there is no extension")
    assert device == CPU or unavailable_reason(device, dtype) == "FP8 here: there is no extension"


def test_the_choice(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes them where they run; the log says how those asked for compute."""
    initialize(ep=1)
    layer = build_layer(config_with(EpConfig(engine="reference", experts="megatron")))
    config, automatic = config_with(GROUPED, **IN_FP8), EpConfig(engine="reference")
    products = "FP8 products, which quantise SwiGLU and add weight gradients in fp32"
    faster = f"they were faster in all shapes measured; {products}"
    held = f"CUDA graphs hold them, and Megatron's need the host; {products}"
    missing = "FP8 here: the extension is built for sm_100"
    monkeypatch.setattr(selection, "unavailable_reason", lambda *_: None)

    def choose(options: EpConfig, in_graph: bool) -> selection.Choice:
        return selection.choose(config, options, layer.experts, 8, 1, in_graph, GPU)

    for in_graph, reason in ((False, faster), (True, held)):
        monkeypatch.setattr(selection, "fp8_unavailable", lambda *_: None)
        assert choose(automatic, in_graph) == selection.Choice("grouped", reason)
        assert choose(GROUPED, in_graph).reason == f"the options ask for them; {products}"
        monkeypatch.setattr(selection, "fp8_unavailable", lambda *_: missing)
        theirs = selection.Choice("megatron", f"grouped ones do not support {missing}")
        assert choose(automatic, in_graph) == theirs


# ---- whether a pass is in FP8


def test_whether_a_pass_is_in_fp8() -> None:
    """TransformerEngine's context decides, as for its own modules."""
    config = SimpleNamespace(**FP8)
    assert powers_of_two_in_use(config) is None  # nothing has imported it
    for module in ("fp8", "quantization"):
        for state, expected in (
            (State(), True),
            (State(powers=(False,) * 3), False),
            (State(is_on=False), None),
        ):
            with autocast(state, module):
                assert powers_of_two_in_use(config) is expected
                assert powers_of_two_in_use(SimpleNamespace(fp8=None)) is None
    for changes in (
        {"kind": type("MXFP4QATFloat8BlockScaling", (Float8BlockScaling,), {})},
        {"fp8_format": Enum("Format", "E4M3 HYBRID").HYBRID},
        {"x_block_scaling_dim": 2},
        {"w_block_scaling_dim": 1},
        {"powers": (True, False, True)},
        {"backward_override": "high_precision"},
    ):
        with (
            autocast(State(**changes)),
            pytest.raises(UnsupportedError, match=r"fp8_autocast with .*: use Float8Block"),
        ):
            powers_of_two_in_use(config)


# ---- layers


def new_layer(kernels: TorchFp8Kernels, **options: Any) -> Any:
    """Of this rank's share of 8 experts, on a CPU, whose FP8 products are those in torch."""
    layer = build_layer(config_with(GROUPED, **{**IN_FP8, **options}))
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.06)
    for module in layer.experts.modules():
        if "weight" in module._parameters:
            module.is_first_microbatch = True  # as TransformerEngine's have
    kernels.calls.clear()
    return layer


def a_pass(layer: Any, hidden: torch.Tensor, probe: torch.Tensor) -> dict[str, torch.Tensor]:
    for parameter in layer.parameters():
        parameter.grad = None
    x = hidden.clone().requires_grad_()
    out, _ = layer(x)
    (out.float() * probe).sum().backward()
    found = {"output": out.detach(), "input": x.grad}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found


# Quantising a value moves it by 2^-5.2 (root mean square); each of the products has two such
# factors, and a weight gradient is behind three products, with errors of their own.
FP8_DISTANCE = 2**-3


@pytest.mark.each_release
@pytest.mark.alone
def test_layers(ctx: RankContext) -> None:
    """A whole layer in FP8, near its results in bf16 and not equal; kernels as they should be."""
    initialize(ep=1)
    with pytest.MonkeyPatch.context() as patch:
        compare_layers(patch, stand_in(patch))


def compare_layers(patch: pytest.MonkeyPatch, kernels: TorchFp8Kernels) -> None:
    layer = new_layer(kernels)
    hidden, probe = drawn(5, 2, 24, 1, WIDTH)
    hidden, probe = hidden.bfloat16(), probe.float()
    plain = a_pass(layer, hidden, probe)
    assert kernels.calls == []  # outside of fp8_autocast
    with autocast(State()):
        with pytest.raises(UnsupportedError, match="FP8 on a CPU: their FP8 products need a GPU"):
            layer(hidden)
        patch.setattr(grouped, "fp8_unavailable", lambda *_: None)
        for quantised in (2, 0):  # matrices of weights, in two micro-batches of a step
            kernels.calls.clear()
            found = a_pass(layer, hidden, probe)
            assert kernels.calls.count("fp8_quantize_weights") == quantised
        layer.eval()
        with torch.no_grad():
            again = layer(hidden)[0]
    assert torch.equal(again, found["output"])
    products = [name for name in kernels.calls[:9] if not name.endswith("weights")]
    assert products[:5] == [
        "fp8_pack_rows", "fp8_unpack_rows", "fp8_multiply_rows", "fp8_swiglu", "fp8_multiply_rows"
    ]  # fmt: skip
    for name, expected in plain.items():
        distance = (found[name] - expected).float().norm() / expected.float().norm()
        assert 1e-3 < distance < FP8_DISTANCE or name == "router.weight", (name, distance)


@pytest.mark.each_release
@pytest.mark.alone
def test_recomputed_activations(ctx: RankContext) -> None:
    """With moe_act, SwiGLU runs again in backward: the same bits."""
    hidden, probe = drawn(5, 2, 24, 1, WIDTH)
    results, runs = [], []
    with pytest.MonkeyPatch.context() as patch:
        kernels = stand_in(patch)
        patch.setattr(grouped, "fp8_unavailable", lambda *_: None)
        for options in ({}, selective("moe_act")):
            initialize(ep=1)
            layer = new_layer(kernels, **options)
            with autocast(State()):
                results.append(a_pass(layer, hidden.bfloat16(), probe.float()))
            runs.append(kernels.calls.count("fp8_swiglu"))
    assert runs == [1, 2]
    for name, one in results[0].items():
        assert torch.equal(one, results[1][name]), name


@pytest.mark.each_release
@pytest.mark.alone
def test_adapters_are_refused(ctx: RankContext) -> None:
    initialize(ep=1)
    layer = new_layer(TorchFp8Kernels())
    wrap(layer, [], of_bridge("of one"))
    with pytest.raises(UnsupportedError, match="adapters are computed in bf16 only"):
        layer(drawn(5, 1, 8, 1, WIDTH)[0].bfloat16())


def test_the_log(ctx: RankContext) -> None:
    """Which experts compute, and that dispatch pads their blocks."""
    initialize(ep=1)
    with mock.patch.object(logging.getLogger("megatron_ncclep"), "log") as log:
        layer = build_layer(config_with(GROUPED, **IN_FP8))
    assert type(layer.experts).__name__.startswith("Grouped")
    assert layer.token_dispatcher.engine.config.block_alignment == 16
    assert any("FP8 products" in str(call.args) for call in log.mock_calls)
