"""Grouped experts in Megatron: its parameters, buffers, optimizer, checkpoints; what is refused.

That a layer computes what Megatron's does is in test_moe_layer.py.
"""

from __future__ import annotations

import re
import sys
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from adam_training import SAME, Training, checkpoints_written
from megatron_setup import BATCH, SEQUENCE, build_layer, initialize, make_config
from on_ranks import gathered
from rank_pool import RankContext
from trainer import ModelCase

from benchmarks.shapes import load
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError

GROUPED = EpConfig(experts="grouped")
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True}


# ---- parameters


@pytest.mark.each_release
def test_parameters_are_megatrons(ctx: RankContext) -> None:
    """The same names, in the same order, with the same values from the same random state."""
    from megatron_ncclep.integration.experts.expert_stack import view_of

    def build(experts: str) -> Any:
        initialize(ep=2)
        return build_layer(
            make_config("ncclep", torch.float32, 2, ncclep=EpConfig(experts=experts), **SWIGLU)
        )

    theirs, ours = build("megatron"), build("grouped")
    assert [type(layer.experts).__name__ for layer in (theirs, ours)] == [
        "SequentialMLP",
        "GroupedLocalExperts",
    ]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    for layer in ("linear_fc1", "linear_fc2"):
        weights = ours.experts.weights_of(layer)
        assert weights[0] is getattr(ours.experts.local_experts[-1], layer).weight
        assert view_of(weights) is not None
        # Where a CUDA graph has seen them.
        addresses = [weight.data_ptr() for weight in weights]
        ours.experts.lay_out_weights()
        assert [weight.data_ptr() for weight in weights] == addresses
    assert ours.token_dispatcher.engine.config.alignment == 16


def test_frozen_weights_that_have_moved(ctx: RankContext) -> None:
    """Experts that were built on a CPU, frozen and moved to a GPU had a memory of their own each,
    and every product began with a copy of all weights.
    """
    from megatron_ncclep.integration.experts.expert_stack import view_of

    initialize(ep=2)
    experts = build_layer(make_config("ncclep", torch.float32, 2, ncclep=GROUPED, **SWIGLU)).experts
    rows, probs, counts = torch.ones(64, 16), torch.ones(64), torch.tensor([16, 0, 32, 16])
    expected, _ = experts(rows, counts, probs)
    for frozen in (False, True):
        for weight in experts.parameters():
            weight.data = weight.data.clone()
            weight.requires_grad_(not frozen)
        found, _ = experts(rows, counts, probs)
        assert torch.equal(found, expected)
        for layer in ("linear_fc1", "linear_fc2"):
            assert (view_of(experts.weights_of(layer)) is not None) == frozen


def test_experts_of_a_model_for_inference_only(ctx: RankContext) -> None:
    """One that was built in inference mode."""
    from megatron_ncclep.integration.experts.expert_stack import view_of

    initialize(ep=2)
    with torch.inference_mode():
        layer = build_layer(make_config("ncclep", torch.float32, 2, ncclep=GROUPED, **SWIGLU))
        assert view_of(layer.experts.weights_of("linear_fc1")) is not None
        assert layer(torch.ones(4, 1, 16))[0].isfinite().all()


def test_frozen_weights_that_an_evaluation_lays_out(ctx: RankContext) -> None:
    """Text generated in inference mode before the first step of fine-tuning left frozen experts in
    memory that autograd refuses: "Inference tensors cannot be saved for backward".
    """
    initialize(ep=2)
    experts = build_layer(make_config("ncclep", torch.float32, 2, ncclep=GROUPED, **SWIGLU)).experts
    for weight in experts.parameters():
        weight.data = weight.data.clone()
        weight.requires_grad_(False)
    rows, probs, counts = torch.ones(64, 16), torch.ones(64), torch.tensor([16, 0, 32, 16])
    with torch.inference_mode():
        expected, _ = experts(rows, counts, probs)
    found, _ = experts(rows.requires_grad_(), counts, probs)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert rows.grad is not None
    assert rows.grad.any()


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
    from megatron_ncclep.integration.experts.expert_stack import view_of

    adds: list[int] = []  # the number of dimensions of each tensor that is added to
    original = torch.Tensor.add_

    def add_(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        adds.append(self.dim())
        return original(self, *args, **more)

    curves = {}
    for name, experts, options in [
        ("megatron", "megatron", {}),
        ("grouped", "grouped", {}),
        ("fused", "grouped", {"gradient_accumulation_fusion": True}),
    ]:
        adds.clear()
        training = Training(ctx, "ncclep", model_of(experts), **options)
        with mock.patch.object(torch.Tensor, "add_", add_):
            curves[name] = [training.step() for _ in range(4)]
        # 2 layers x 2 products x 4 steps, for all experts at once; the first of a step's two
        # micro-batches is not added.
        assert adds.count(3) == (16 if name == "fused" else 0), name
        if experts == "grouped":
            # In Megatron's buffers now, where weights and gradients are used as they lie.
            for module in training.experts:
                for layer in ("linear_fc1", "linear_fc2"):
                    weights = module.weights_of(layer)
                    assert view_of(weights) is not None
                    assert view_of([weight.main_grad for weight in weights]) is not None
    expected = curves["megatron"]
    assert expected[-1][0] < expected[0][0]
    # Blocks are padded to 16 rows, which a product sums in another order.
    assert curves["grouped"] == [pytest.approx(step, rel=SAME[ctx.device]) for step in expected]
    # It is the same sum whoever adds gradients up.
    assert curves["fused"] == curves["grouped"]


# ---- checkpoints


@pytest.mark.each_release
@checkpoints_written()
def test_checkpoints_go_both_ways(ctx: RankContext, tmp_path: Path) -> None:
    """Model and optimizer, in the format that stores buffers as they lie, without names."""
    from megatron.core import dist_checkpointing

    for before, after in [("megatron", "grouped"), ("grouped", "megatron")]:
        saved = Training(ctx, "ncclep", model_of(before))
        for _ in range(2):
            saved.step()
        expected = saved.everything()
        target = tmp_path / before
        if ctx.rank == 0:
            target.mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(saved.state(is_loading=False), str(target))

        loaded = Training(ctx, "ncclep", model_of(after), seed=1)
        loaded.load(target)
        found = loaded.everything()
        assert found.keys() == expected.keys()
        assert any("exp_avg" in key for key in found)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (before, after, key)
        assert loaded.step() == pytest.approx(saved.step(), rel=SAME[ctx.device])


# ---- refusals

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "add_bias_linear": ({"add_bias_linear": True}, "add_bias_linear=True: leave the biases out"),
    "op-fuser": ({"use_transformer_engine_op_fuser": True}, "leave it out: with it Transformer"),
    "one-parameter": ({"moe_single_grouped_weight": True}, "one parameter for each expert"),
    "te-activation": ({"use_te_activation_func": True}, "Megatron's own activations"),
    "fp8-activation": ({"activation_func_fp8_input_store": True}, "kept as they are"),
    "trained-act": (
        {"activation_func": torch.nn.PReLU()},
        "num_parameters=1): use one without param",
    ),
    "interleaved": ({"moe_mlp_glu_interleave_size": 8}, "moe_mlp_glu_interleave_size=8: leave it"),
    "fp8": ({"fp8": "e4m3"}, "fp8='e4m3': leave it out: they compute in bf16"),
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
        for option, value in options.items():
            setattr(config, option, value)
        with pytest.raises(UnsupportedError) as caught:
            build_layer(config)
        text = str(caught.value)
        assert message in text, name
        assert text.startswith("experts='grouped' (--ncclep-experts grouped) does not support")
        assert text.endswith("experts='megatron'")

    # What a rank has of an expert counts.
    initialize(ep=2, tp=2, etp=2)
    options = {"expert_tensor_parallel_size": 2, "moe_ffn_hidden_size": 24, "ncclep": GROUPED}
    with pytest.raises(UnsupportedError, match="=24: it must be a multiple of 16, 8 for each of "):
        build_layer(make_config("ncclep", torch.float32, 2, 2, **options))
    initialize(ep=4)

    # With a dispatcher of another type, experts would silently stay Megatron's.
    other = make_config("alltoall", torch.float32, 4)
    other.ncclep = GROUPED
    with pytest.raises(UnsupportedError, match="dispatcher is 'alltoall', which would ignore it"):
        build_layer(other)
    other.ncclep = EpConfig(alignment=16)
    assert type(build_layer(other).experts).__name__ == "SequentialMLP"


@pytest.mark.each_release
def test_experts_that_are_not_megatrons(ctx: RankContext) -> None:
    initialize(ep=4)
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_ncclep.integration.experts.grouped import group_experts

    layer = build_layer(make_config("ncclep", torch.float32, 4))
    layer.experts.__class__ = type("Own", (SequentialMLP,), {})
    with pytest.raises(UnsupportedError, match="class Own: it replaces TEGroupedMLP and"):
        group_experts(layer.experts)

    # A linear of a layer's own spec: its forward would not be called.
    layer = build_layer(make_config("ncclep", torch.float32, 4))
    linear = layer.experts.local_experts[0].linear_fc1
    linear.__class__ = type("Own", (type(linear),), {"__module__": "tests"})
    with pytest.raises(UnsupportedError, match="linear_fc1 of the class Own in the experts of"):
        group_experts(layer.experts)

    layer = build_layer(make_config("ncclep", torch.float32, 4, ncclep=GROUPED))
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
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_ncclep.integration.experts import selection

    initialize(ep=4)
    config = make_config("ncclep", torch.float32, 4, ncclep=GROUPED)
    theirs = build_layer(make_config("ncclep", torch.float32, 4)).experts
    for kind, where in (
        (RowParallelLinear, "local_experts.0.linear_fc2"),
        (SequentialMLP, "experts"),
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


GPU = torch.device("cuda")
# A layer of qwen3-30b-a3b on 2 ranks, and one of mixtral-8x7b.
SMALL = {"hidden_size": 2048, "moe_ffn_hidden_size": 768, "moe_router_topk": 8}
LARGE = {"hidden_size": 4096, "moe_ffn_hidden_size": 14336, "moe_router_topk": 2}
AUTO = EpConfig(experts="auto")


def test_the_choice(ctx: RankContext) -> None:
    """By shape, unless grouped experts do not support something, or only they do."""
    initialize(ep=4)
    from megatron_ncclep.integration.experts import selection as choice

    layer = build_layer(make_config("ncclep", torch.float32, 4))

    def chosen(
        num_experts: int, device: torch.device = GPU, in_graph: bool = False,
        options: EpConfig = AUTO, reason: str | None = None, slices: int = 1,
        quack: str | None = "quack-kernels is not installed", **fields: Any,
    ) -> tuple[str, str]:  # fmt: skip
        config = make_config("ncclep", torch.bfloat16, 4)
        vars(config).update(fields)
        of_layer = (layer.experts, num_experts, slices)
        with (
            mock.patch.object(choice, "unavailable_reason", return_value=reason),
            mock.patch.object(choice.fused_swiglu, "unavailable_reason", return_value=quack),
        ):
            found = choice.choose(config, options, *of_layer, in_graph, device)
        return found.experts, found.reason

    experts, reason = chosen(64, **SMALL)
    assert experts == "grouped"
    assert "each of 64 has about 512 rows (4096 tokens, assumed) of 2048 x 768" in reason
    assert chosen(4, **LARGE)[0] == "megatron"
    assert "each of 4 has about 2048 rows" in chosen(4, **LARGE)[1]
    halves = chosen(4, slices=2, **LARGE)[1]  # of experts; the rows of both ranks
    assert "4096 rows (4096 tokens, assumed) of 4096 x 7168, 120.3 G" in halves
    assert "of 64 x 14336" in chosen(4, **LARGE, moe_latent_size=64)[1]
    # Whatever the shape says:
    accumulates = {"gradient_accumulation_fusion": True}
    experts, reason = chosen(4, quack=None, **LARGE, **accumulates, **SWIGLU)
    assert experts == "grouped"
    assert "all shapes measured; GEMMs of quack-kernels" in reason
    assert chosen(4, quack=None, **LARGE, **accumulates, activation_func=F.gelu)[0] == "megatron"
    cpu = torch.device("cpu")
    assert chosen(64, cpu, **SMALL) == ("megatron", "grouped ones were not measured on a CPU")
    assert chosen(4, in_graph=True, **LARGE)[0] == "grouped"
    for options in ({"add_bias_linear": True}, {"in_graph": True, "add_bias_linear": True}):
        experts, reason = chosen(64, **SMALL, **options)
        assert experts == "megatron"
        assert "add_bias_linear=True: leave the biases out" in reason
    assert chosen(64, reason="a GPU of 8.0", **SMALL)[1].endswith("do not support a GPU of 8.0")
    assert "alignment=1: it must be" in chosen(64, options=EpConfig(alignment=1), **SMALL)[1]
    rows = EpConfig(experts="auto", max_recv_rows=40)
    assert "max_recv_rows=40: it must be a multiple of 16" in chosen(64, options=rows, **SMALL)[1]

    # Megatron-LM's arguments say how many tokens there are.
    arguments = SimpleNamespace(seq_length=8192, micro_batch_size=2)
    holder = SimpleNamespace(_GLOBAL_ARGS=arguments)
    with mock.patch.dict(sys.modules, {"megatron.training.global_vars": holder}):
        assert "about 2048 rows (16384 tokens) of 2048 x 768" in chosen(64, **SMALL)[1]
        divided = {"context_parallel_size": 2, "sequence_parallel": True}
        assert "(2048 tokens)" in chosen(64, **SMALL, **divided, tensor_model_parallel_size=4)[1]
        # As it was measured.
        found, fused = {}, {}
        arguments.micro_batch_size = 1
        for shape in load("layers").shapes:
            arguments.seq_length = shape.tokens
            sizes = {"hidden_size": shape.hidden, "moe_ffn_hidden_size": shape.ffn_hidden_size}
            sizes["moe_router_topk"] = shape.top_k
            found[shape.name] = chosen(shape.experts, **sizes)[0]
            fused[shape.name] = chosen(shape.experts, **sizes, **accumulates)[0]
        slower = ["mixtral-8x7b", "deepseek-v3, rank of 8"]
        assert found == {name: "megatron" if name in slower else "grouped" for name in found}
        slower += ["gpt-oss-120b, rank of 8"]
        assert fused == {name: "megatron" if name in slower else "grouped" for name in fused}
        holder._GLOBAL_ARGS = None  # not parsed yet
        assert "(4096 tokens, assumed)" in chosen(64, **SMALL)[1]


@pytest.mark.each_release
def test_automatic_layers(ctx: RankContext) -> None:
    """What is chosen is built, with its alignment and the engine's options, and logged once."""
    initialize(ep=2)
    from megatron_ncclep.integration.experts import selection as choice
    from megatron_ncclep.logs import get_logger

    config = make_config("ncclep", torch.float32, 2, ncclep=AUTO, **SWIGLU)
    grouped = choice.Choice("grouped", "a test says so")
    with mock.patch.object(get_logger(), "handle") as logged:
        layers = [build_layer(config), build_layer(config)]
        with mock.patch.object(choice, "choose", return_value=grouped):
            layers.append(build_layer(config))
    lines = [call.args[0].getMessage() for call in logged.call_args_list]
    layers[2].load_state_dict(layers[0].state_dict())
    assert config.ncclep is AUTO
    built = [
        (type(layer.experts).__name__, layer.token_dispatcher.engine.config) for layer in layers
    ]
    assert [name for name, _ in built] == [*["SequentialMLP"] * 2, "GroupedLocalExperts"]
    assert [found.experts for _, found in built] == ["megatron", "megatron", "grouped"]
    assert [found.block_alignment for _, found in built] == [1, 1, 16]
    hidden = torch.randn(SEQUENCE, BATCH, 16)
    outputs = [layer(hidden)[0] for layer in layers]
    torch.testing.assert_close(outputs[2], outputs[0])  # of the same weights
    said = gathered(ctx, [line for line in lines if line.startswith("experts: ")])
    assert sorted(map(len, said)) == [0, 0, 2, 2]  # two groups, their first ranks
    assert max(said)[0] == "experts: megatron, because grouped ones were not measured on a CPU"


def test_the_option() -> None:
    assert (EpConfig().experts, EpConfig().alignment) == ("auto", None)
    assert (
        EpConfig(experts="grouped").alignment == EpConfig.resolve(experts="grouped").alignment == 16
    )
    for options, text in (
        ({"alignment": 1}, "alignment 1: grouped experts need blocks of a"),
        ({"max_recv_rows": 24}, "max_recv_rows 24: must be a multiple of the alignment 16"),
    ):
        with pytest.raises(InputError, match=text):
            EpConfig(experts="grouped", **options)
    with pytest.raises(InputError, match=r"experts 'mine': must be one of \('megatron', 'grouped'"):
        EpConfig(experts="mine")
