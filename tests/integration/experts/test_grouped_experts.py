"""Grouped experts in Megatron: its parameters, buffers, optimizer, checkpoints; what is refused.

That a layer computes what Megatron's does is in test_moe_layer.py.
"""

from __future__ import annotations

import copy
import re
import sys
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from adam_training import SAME, Training, checkpoints_written
from megatron_setup import BATCH, SEQUENCE, SWIGLU, build_layer, initialize, make_config, new_layer
from on_ranks import IS_RANK, gathered
from rank_pool import RankContext
from trainer import ModelCase, differences

from benchmarks.shapes import load
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.integration.experts.expert_stack import view_of

if IS_RANK:
    from megatron_ncclep.integration.experts import selection

AUTO, GROUPED, THEIRS = (EpConfig(experts=name) for name in ("auto", "grouped", "megatron"))
LINEARS = ("linear_fc1", "linear_fc2")


# ---- parameters


@pytest.mark.each_release
def test_parameters_are_megatrons(ctx: RankContext) -> None:
    """The same names, in the same order, with the same values from the same random state."""
    theirs, ours = (new_layer(2, ncclep=options, **SWIGLU) for options in (THEIRS, GROUPED))
    assert [type(layer.experts).__name__ for layer in (theirs, ours)] == [
        "SequentialMLP",
        "GroupedLocalExperts",
    ]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    for layer in LINEARS:
        weights = ours.experts.weights_of(layer)
        assert weights[0] is getattr(ours.experts.local_experts[-1], layer).weight
        assert view_of(weights) is not None
        # Where a CUDA graph has seen them.
        addresses = [weight.data_ptr() for weight in weights]
        ours.experts.lay_out_weights()
        assert [weight.data_ptr() for weight in weights] == addresses
    assert ours.token_dispatcher.engine.config.alignment == 16


@pytest.mark.parametrize(
    ("frozen", "evaluates"), [(False, False), (True, False), (True, True)], ids=str
)
def test_weights_that_have_moved(ctx: RankContext, frozen: bool, evaluates: bool) -> None:
    """Experts that were built on a CPU, frozen and moved to a GPU had a memory of their own each,
    and every product began with a copy of all weights.  Text generated in inference mode before the
    first step left them in memory that autograd refuses: "Inference tensors cannot be saved for
    backward".
    """
    experts = new_layer(2, ncclep=GROUPED, **SWIGLU).experts
    rows, probs, counts = torch.ones(64, 16), torch.ones(64), torch.tensor([16, 0, 32, 16])
    expected, _ = experts(rows, counts, probs)
    for weight in experts.parameters():
        weight.data = weight.data.clone()
        weight.requires_grad_(not frozen)
    with torch.inference_mode() if evaluates else nullcontext():
        assert torch.equal(experts(rows, counts, probs)[0], expected)
    found, _ = experts(rows.requires_grad_(), counts, probs)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert rows.grad is not None
    assert rows.grad.any()
    for layer in LINEARS:
        assert (view_of(experts.weights_of(layer)) is not None) == frozen


def test_experts_of_a_model_for_inference_only(ctx: RankContext) -> None:
    """One that was built in inference mode."""
    with torch.inference_mode():
        layer = new_layer(2, ncclep=GROUPED, **SWIGLU)
        assert view_of(layer.experts.weights_of("linear_fc1")) is not None
        assert layer(torch.ones(4, 1, 16))[0].isfinite().all()


# ---- training


def model_of(experts: str) -> ModelCase:
    options = {"ncclep": EpConfig(experts=experts), **SWIGLU}
    return ModelCase(experts, options, dtype=torch.float32)


@pytest.mark.each_release
@pytest.mark.supports(
    "--ncclep-experts=grouped",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "gradient_accumulation_fusion",
    compared="losses and gradient norms with Megatron's own experts, 2e-6 (fp32, Adam)",
)
def test_training_with_the_distributed_optimizer(ctx: RankContext) -> None:
    """Weights that the overlapped gather had not delivered yet would be those of the last step."""
    adds: list[int] = []  # the number of dimensions of each tensor that is added to
    original = torch.Tensor.add_

    def add_(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        adds.append(self.dim())
        return original(self, *args, **more)

    curves = {}
    for name, experts in (("megatron", "megatron"), ("grouped", "grouped"), ("fused", "grouped")):
        adds.clear()
        training = Training(ctx, "ncclep", model_of(experts))
        modules = [layer.mlp.experts for layer in training.chunks[0].decoder.layers]
        for module in modules:  # the other layers would need a GPU for the option
            module.config = copy.copy(module.config)
            module.config.gradient_accumulation_fusion = name == "fused"
        with mock.patch.object(torch.Tensor, "add_", add_):
            curves[name] = [training.step() for _ in range(4)]
        # 2 layers x 2 products x 4 steps, for all experts at once; the first of a step's two
        # micro-batches is not added.
        assert adds.count(3) == (16 if name == "fused" else 0), name
        if experts == "grouped":
            # In Megatron's buffers now, where weights and gradients are used as they lie.
            for module in modules:
                for layer in LINEARS:
                    weights = module.weights_of(layer)
                    assert view_of(weights) is not None
                    assert view_of([weight.main_grad for weight in weights]) is not None
    expected = curves["megatron"]
    assert expected[-1][0] < expected[0][0]
    # Blocks are padded to 16 rows, which a product sums in another order.
    assert curves["grouped"] == [pytest.approx(step, rel=SAME[ctx.device]) for step in expected]
    # It is the same sum whoever adds gradients up.
    assert curves["fused"] == curves["grouped"]


@pytest.mark.each_release
@checkpoints_written()
def test_checkpoints_go_both_ways(ctx: RankContext, tmp_path: Path) -> None:
    """Model and optimizer, in the format that stores buffers as they lie, without names."""
    for before, after in [("megatron", "grouped"), ("grouped", "megatron")]:
        saved = Training(ctx, "ncclep", model_of(before))
        for _ in range(2):
            saved.step()
        expected = saved.everything()
        assert any("exp_avg" in key for key in expected)
        target = tmp_path / before
        if ctx.rank == 0:
            target.mkdir()
        torch.distributed.barrier()
        saved.save(target)

        loaded = Training(ctx, "ncclep", model_of(after), seed=1)
        loaded.load(target)
        assert differences(loaded.everything(), expected) == [], before
        assert loaded.step() == pytest.approx(saved.step(), rel=SAME[ctx.device])


# ---- refusals

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "add_bias_linear": ({"add_bias_linear": True}, "add_bias_linear=True: leave the biases out"),
    "op-fuser": ({"use_transformer_engine_op_fuser": True}, "leave it out: with it Transformer"),
    "one-parameter": ({"moe_single_grouped_weight": True}, "one parameter for each expert"),
    "te-activation": ({"use_te_activation_func": True}, "Megatron's own activations"),
    "fp8-activation": ({"activation_func_fp8_input_store": True}, "kept as they are"),
    "trained-act": ({"activation_func": torch.nn.PReLU()}, "ers=1): use one without param"),
    "interleaved": ({"moe_mlp_glu_interleave_size": 8}, "moe_mlp_glu_interleave_size=8: leave it"),
    "recipe": ({"quant_recipe": object()}, "quantised experts are not supported yet"),
    "delayed": ({"delay_wgrad_compute": True}, "delay_wgrad_compute=True: leave it out"),
    "delayed-too": (
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        "overlap_dispatch_backward_with_experts_wgrad=True: leave it out",
    ),
    "offloading": ({"cpu_offloading": True}, "offloading is not supported"),
    "offloaded-act": ({"offload_modules": ["core_attn", "moe_act"]}, "leave out expert_fc1, moe"),
    "sharded-weights": ({"expert_gtp_weight_remat_size": 2}, "gathered for each use"),
    "hidden": ({"hidden_size": 20}, "hidden_size=20: it must be a multiple of 8"),
    "latent": ({"moe_latent_size": 12}, "moe_latent_size=12: it must be a multiple of 8"),
    "ffn": ({"moe_ffn_hidden_size": 36}, "moe_ffn_hidden_size=36: it must be a multiple of 8"),
    "many": ({"num_moe_experts": 4096}, "1024 experts on one rank: at most 1023"),
    "unfused-moe-act": (
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        "set bias_activation_fusion",
    ),
}


@pytest.mark.each_release
def test_refusals(ctx: RankContext) -> None:
    initialize(ep=4)
    for name, (options, message) in REFUSED.items():
        config = make_config("ncclep", torch.float32, 4, ncclep=GROUPED)
        # Set after validation: Megatron's own checks require other options for some of them.
        vars(config).update(options)
        with pytest.raises(UnsupportedError) as caught:
            build_layer(config)
        text = str(caught.value)
        assert message in text, name
        assert text.startswith("experts='grouped' (--ncclep-experts grouped) does not support")
        assert text.endswith("experts='megatron'")

    # With a dispatcher of another type, experts would silently stay Megatron's.
    other = make_config("alltoall", torch.float32, 4)
    other.ncclep = GROUPED
    with pytest.raises(UnsupportedError, match="dispatcher is 'alltoall', which would ignore it"):
        build_layer(other)
    other.ncclep = EpConfig(alignment=16)
    assert type(build_layer(other).experts).__name__ == "SequentialMLP"

    # What a rank has of an expert counts.
    initialize(ep=2, tp=2, etp=2)
    options = {"expert_tensor_parallel_size": 2, "moe_ffn_hidden_size": 24, "ncclep": GROUPED}
    with pytest.raises(UnsupportedError, match="=24: it must be a multiple of 16, 8 for each of "):
        build_layer(make_config("ncclep", torch.float32, 2, 2, **options))


@pytest.mark.each_release
def test_experts_that_are_not_megatrons(ctx: RankContext) -> None:
    from megatron_ncclep.integration.experts.grouped import group_experts

    experts = new_layer(4).experts
    # A linear of a layer's own spec: its forward would not be called.
    linear = experts.local_experts[0].linear_fc1
    linear.__class__ = type("OwnLinear", (type(linear),), {"__module__": "tests"})
    words = "linear_fc1 of the class OwnLinear in the experts of"
    with pytest.raises(UnsupportedError, match=words):
        group_experts(experts)
    experts.__class__ = type("Own", (type(experts),), {})
    with pytest.raises(UnsupportedError, match="class Own: it replaces TEGroupedMLP and"):
        group_experts(experts)

    layer = new_layer(4, ncclep=GROUPED)
    hidden = torch.randn(4, 1, 16)
    hook = layer.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="remove it"):
        layer(hidden)
    hook.remove()
    layer(hidden)
    layer.experts.weights_of("linear_fc1")[0].get_main_grad = None
    with pytest.raises(UnsupportedError, match="FSDP: use DistributedDataParallel"):
        layer(hidden)


@pytest.mark.each_release
def test_a_forward_that_was_replaced_before(ctx: RankContext) -> None:
    """A library that patches a class of Megatron's before the model is built had no effect."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    theirs = new_layer(4).experts
    config = make_config("ncclep", torch.float32, 4, ncclep=GROUPED)
    for kind, where in (
        (RowParallelLinear, "local_experts.0.linear_fc2"),
        (type(theirs), "experts"),
    ):
        original = kind.forward
        patch = wraps(original)(lambda *args, original=original: original(*args))
        for each in (patch, torch.no_grad()(patch)):
            with mock.patch.object(kind, "forward", each):
                said = f"{where} \\({kind.__name__}\\) has another forward, of test_grouped_experts"
                with pytest.raises(UnsupportedError, match=said):
                    build_layer(config)
                choice = selection.choose(config, AUTO, theirs, 2, 1, False)
                assert choice.experts == "megatron"
                assert re.search(said, choice.reason)


# ---- the choice


# A layer of qwen3-30b-a3b on 2 ranks with 64 experts each, and one of mixtral-8x7b with 4.
SMALL = {"num": 64, "hidden_size": 2048, "moe_ffn_hidden_size": 768, "moe_router_topk": 8}
LARGE = {"num": 4, "hidden_size": 4096, "moe_ffn_hidden_size": 14336, "moe_router_topk": 2}
QUACK = {"quack": None, "gradient_accumulation_fusion": True}
NOT_MEASURED = "grouped ones were not measured on a CPU"
BIASES = "add_bias_linear=True: leave the biases out"
# By shape, unless grouped experts do not support something, or only they do.
CHOICES: list[tuple[dict[str, Any], str, str]] = [
    (SMALL, "grouped", "of 64 has about 512 rows (4096 tokens, assumed) of 2048 x 768"),
    (LARGE, "megatron", "each of 4 has about 2048 rows"),
    # Halves of experts, with the rows of both ranks.
    (LARGE | {"slices": 2}, "megatron", "4096 rows (4096 tokens, assumed) of 4096 x 7168, 120.3 G"),
    (LARGE | {"moe_latent_size": 64}, "grouped", "of 64 x 14336"),
    (LARGE | QUACK | SWIGLU, "grouped", "all shapes measured; GEMMs of quack-kernels"),
    (LARGE | QUACK | {"activation_func": F.gelu}, "megatron", "4 has about 2048 rows"),
    (SMALL | {"device": "cpu"}, "megatron", NOT_MEASURED),
    (LARGE | {"in_graph": True}, "grouped", "CUDA graphs hold them"),
    (SMALL | {"add_bias_linear": True}, "megatron", BIASES),
    (SMALL | {"add_bias_linear": True, "in_graph": True}, "megatron", BIASES),
    (SMALL | {"reason": "a GPU of 8.0"}, "megatron", "do not support a GPU of 8.0"),
    (SMALL | {"options": EpConfig(alignment=1)}, "megatron", "alignment=1: it must be"),
    (
        SMALL | {"options": EpConfig(experts="auto", max_recv_rows=40)},
        "megatron",
        "max_recv_rows=40: it must be a multiple of 16",
    ),
]


def test_the_choice(ctx: RankContext) -> None:
    layer = new_layer(4)

    def chosen(
        num: int, device: str = "cuda", in_graph: bool = False,
        options: EpConfig = AUTO, reason: str | None = None, slices: int = 1,
        quack: str | None = "quack-kernels is not installed", **fields: Any,
    ) -> tuple[str, str]:  # fmt: skip
        config = make_config("ncclep", torch.bfloat16, 4)
        vars(config).update(fields)
        of_layer = (layer.experts, num, slices)
        with (
            mock.patch.object(selection, "unavailable_reason", return_value=reason),
            mock.patch.object(selection.fused_swiglu, "unavailable_reason", return_value=quack),
        ):
            found = selection.choose(config, options, *of_layer, in_graph, torch.device(device))
        return found.experts, found.reason

    for arguments, experts, words in CHOICES:
        found = chosen(**arguments)
        assert found[0] == experts, found
        assert words in found[1]

    # Megatron-LM's arguments say how many tokens there are.
    known = SimpleNamespace(seq_length=8192, micro_batch_size=2)
    holder = SimpleNamespace(_GLOBAL_ARGS=known)
    with mock.patch.dict(sys.modules, {"megatron.training.global_vars": holder}):
        assert "about 2048 rows (16384 tokens) of 2048 x 768" in chosen(**SMALL)[1]
        divided = {"context_parallel_size": 2, "sequence_parallel": True}
        assert "(2048 tokens)" in chosen(**SMALL, **divided, tensor_model_parallel_size=4)[1]
        # As it was measured.
        known.micro_batch_size = 1
        slower = {"mixtral-8x7b", "deepseek-v3, rank of 8"}
        slower_fused = {*slower, "gpt-oss-120b, rank of 8"}
        for shape in load("layers").shapes:
            known.seq_length = shape.tokens
            sizes = {"hidden_size": shape.hidden, "moe_ffn_hidden_size": shape.ffn_hidden_size}
            sizes |= {"num": shape.experts, "moe_router_topk": shape.top_k}
            for accumulates, names in ((False, slower), (True, slower_fused)):
                found, _ = chosen(**sizes, gradient_accumulation_fusion=accumulates)
                assert found == ("megatron" if shape.name in names else "grouped"), shape.name
        holder._GLOBAL_ARGS = None  # not parsed yet
        assert "(4096 tokens, assumed)" in chosen(**SMALL)[1]


@pytest.mark.each_release
def test_automatic_layers(ctx: RankContext) -> None:
    """What is chosen is built, with its alignment and the engine's options, and logged once."""
    initialize(ep=2)
    from megatron_ncclep.logs import get_logger

    config = make_config("ncclep", torch.float32, 2, ncclep=AUTO, **SWIGLU)
    grouped = selection.Choice("grouped", "a test says so")
    with mock.patch.object(get_logger(), "handle") as logged:
        layers = [build_layer(config), build_layer(config)]
        with mock.patch.object(selection, "choose", return_value=grouped):
            layers.append(build_layer(config))
    layers[2].load_state_dict(layers[0].state_dict())
    assert config.ncclep is AUTO
    engines = [layer.token_dispatcher.engine.config for layer in layers]
    assert [(type(layer.experts).__name__, engine.experts, engine.block_alignment)
            for layer, engine in zip(layers, engines, strict=True)] == [
        *[("SequentialMLP", "megatron", 1)] * 2, ("GroupedLocalExperts", "grouped", 16)
    ]  # fmt: skip
    hidden = torch.randn(SEQUENCE, BATCH, 16)
    outputs = [layer(hidden)[0] for layer in layers]
    torch.testing.assert_close(outputs[2], outputs[0])  # of the same weights
    lines = [call.args[0].getMessage() for call in logged.call_args_list]
    said = gathered(ctx, [line for line in lines if line.startswith("experts: ")])
    assert sorted(map(len, said)) == [0, 0, 2, 2]  # two groups, their first ranks
    assert max(said)[0] == f"experts: megatron, because {NOT_MEASURED}"


def test_the_option() -> None:
    assert (EpConfig().experts, EpConfig().alignment) == ("auto", None)
    assert GROUPED.alignment == EpConfig.resolve(experts="grouped").alignment == 16
    for options, text in (
        ({"alignment": 1}, "alignment 1: grouped experts need blocks of a"),
        ({"max_recv_rows": 24}, "max_recv_rows 24: must be a multiple of the alignment 16"),
        ({"experts": "mine"}, r"experts 'mine': must be one of \('megatron', 'grouped'"),
    ):
        with pytest.raises(InputError, match=text):
            EpConfig(**{"experts": "grouped", **options})
