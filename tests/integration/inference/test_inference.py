"""Generating text with Megatron-Core on a CPU: its own inference experts and engine, with ours and
its own dispatcher between the ranks.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from inference_case import (
    Batch,
    InferenceCase,
    build_gpt,
    build_inference_layer,
    experts_of,
    make_inference_config,
    moe_builder,
    text_generated,
    use_whole_numbers,
)
from megatron_setup import drawn, has, initialize
from rank_pool import RankContext
from trainer import differences

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.reference.engine import CAPS, ReferenceEngine
from megatron_ncclep.errors import (
    EngineUnavailableError,
    GroupClosedError,
    InputError,
    PeerError,
    UnsupportedError,
)
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

pytestmark = pytest.mark.each_release

CASE = InferenceCase(options={"moe_router_topk": 3})
FFN = 32
# Tokens of the two ranks of a group; low-latency mode takes 4.
SIZES = [(3, 4), (0, 2), (1, 0), (0, 0), (2, 9), (7, 0), (4, 4)]


def watched_engine(layer: Any) -> Any:
    """Watch the plans of the engine, which takes a batch where low-latency mode does not."""
    engine = layer._inference_token_dispatcher.session.engine
    return mock.patch.object(engine, "plan", wraps=engine.plan)


@pytest.mark.since("0.18")
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    "transformer_impl=inference_optimized",
    "--ncclep-inference-tokens",
    compared="what experts of whole numbers make of batches of 0 to 9 tokens with their definition "
    "and with Megatron's dispatcher `nccl`, to the bit",
)
def test_experts_get_their_rows(ctx: RankContext) -> None:
    """Batches of 0 tokens on one rank or on all, and batches that are too large on one rank."""
    from megatron.core import parallel_state

    layer = build_inference_layer(ctx, CASE)
    theirs = build_inference_layer(ctx, dataclasses.replace(CASE, kind="nccl"))
    for built in (layer, theirs):
        use_whole_numbers(built)
    rank = parallel_state.get_expert_model_parallel_rank()
    too_large = 0
    with watched_engine(layer) as plan:
        for round_, sizes in enumerate(SIZES):
            batch = Batch.random(sizes[rank], 10 * round_ + ctx.rank, layer.config, "cpu")
            out = experts_of(layer, batch)
            assert torch.equal(out, batch.expected(FFN)), (sizes, rank)
            if sum(sizes):  # Megatron's kernels want a row
                assert torch.equal(out, experts_of(theirs, batch)), (sizes, rank)
            too_large += max(sizes) > 4
            assert plan.call_count == too_large


@pytest.mark.since("0.18")
def test_one_assignment(ctx: RankContext) -> None:
    """For top-1 Megatron's router makes [tokens], not [tokens, 1]; its own dispatchers fail."""
    from megatron.core.inference.utils import InferenceMode

    options = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    layer = build_inference_layer(ctx, dataclasses.replace(CASE, options=options))
    hidden = drawn(ctx.rank, 3, 1, 16).bfloat16()
    with torch.no_grad(), InferenceMode.active():
        probs, topk = layer.router(hidden)
        assert (probs.shape, topk.shape) == ((3,), (3,))
        out, _ = layer(hidden)
    batch = Batch(hidden[:, 0], topk[:, None], probs[:, None])
    assert out.shape == hidden.shape
    assert torch.equal(out[:, 0], experts_of(layer, batch))


@pytest.mark.since("0.18")
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    compared="outputs and gradients of training passes between those that generate text with "
    "alltoall's, which generates none, to the bit",
)
def test_training_passes_take_the_other_dispatcher(ctx: RankContext) -> None:
    from megatron.core.inference.utils import InferenceMode

    results: list[dict[str, Any]] = []
    # With two assignments of a token, sums have two terms.
    for case in (
        InferenceCase("nccl"),
        InferenceCase(trains="ncclep"),
        # Every forward pass chose among Megatron's own dispatchers, and trained with `alltoall`.
        InferenceCase("nccl", trains="ncclep", ncclep={}),
    ):
        layer, found = build_inference_layer(ctx, case), {}
        for without_gradients in (torch.inference_mode, torch.no_grad):
            x = drawn(len(found) + ctx.rank, 6, 2, 16).bfloat16().requires_grad_()
            if case.kind == "ncclep":
                with without_gradients(), InferenceMode.active():
                    layer.eval()(x[:2, :1])
                assert type(layer.token_dispatcher).__name__ == "NcclEpInferenceDispatcher"
            out, _ = layer.train()(x)
            is_ours = type(layer.token_dispatcher).__name__ == "NcclEpTokenDispatcher"
            assert is_ours == (case.trains == "ncclep")
            out.sum().backward()
            name = without_gradients.__name__
            found |= {f"output {name}": out.detach(), f"input {name}": x.grad}
        found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        results.append(found)
    expected, *others = results
    assert [differences(found, expected) for found in others] == [[], []]


PROMPTS = (3, 5), (6, 2)
NUM_NEW = 3


@pytest.mark.since("0.18")
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    "generation of text",
    compared="the tokens that a model generates with those with Megatron's dispatcher `nccl`",
)
def test_tokens_are_those_of_nccl(ctx: RankContext) -> None:
    """Two prompts one after the other on each rank, of other lengths than on the other one."""
    lengths, tokens = PROMPTS[ctx.rank % 2], []
    prompts = [[(5 * ctx.rank + 7 * i * i + 3) % 47 for i in range(n)] for n in lengths]
    for kind in ("nccl", "ncclep"):
        gpt = build_gpt(ctx, InferenceCase(kind))
        watch = nullcontext() if kind == "nccl" else watched_engine(gpt.decoder.layers[0].mlp)
        with text_generated(gpt) as generate, watch as plan:
            tokens.append([generate(prompt, NUM_NEW) for prompt in prompts])
    assert tokens[0] == tokens[1]
    assert [len(prompt) for prompt in tokens[0]] == [NUM_NEW] * 2
    # In both layers: prompts that are too long on one rank; and then come single tokens.
    assert plan.call_count == 2 * 2


# --- refusals ------------------------------------------------------------------------------------


# What is set, and the words of the refusal.
REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"transformer_impl": "local"},
        "transformer_impl='local' and num_moe_experts=8: Megatron-Core",
    ),
    (
        {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_grouped_gemm": False},
        "with transformer_impl='inference_optimized' and num_moe_experts=None: Megatron-Core",
    ),
    ({"inference_grouped_gemm_backend": "flashinfer"}, "='flashinfer': .* set 'vllm' or 'torch'"),
]
# What an engine can do at most.
REFUSED_ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"low_latency_tokens": 0}, "engine 'reference' has none: where engine 'native' can"),
    ({"low_latency_tokens": 2}, "max_tokens 5: low-latency mode of 'reference' takes 1 to 2"),
    ({"max_top_k": 2}, "top_k 3: low-latency mode of 'reference' takes 1 to 2"),
    ({"row_bytes_multiple": 64}, "a row has 32 bytes: engine 'reference' needs a multiple of 64"),
]


def refuses(option: str, words: str, engines: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    return pytest.mark.refuses(option, words=words, engines=engines)


WANTED = "inference_moe_token_dispatcher_type=ncclep"


@pytest.mark.since("0.18")
@refuses(WANTED, "without `transformer_impl=inference_optimized` it would be ignored: set that")
@refuses(
    WANTED, "with another `params_dtype` than bf16: Megatron's inference experts take no other"
)
@refuses(
    "inference_grouped_gemm_backend=flashinfer",
    "for inference with `ncclep`, not tested: set `vllm` or `torch`",
)
@refuses(
    WANTED,
    "with engines `hierarchical` and `nccl_ep`, which have no low-latency mode",
    ("hierarchical", "nccl_ep"),
)
@refuses(
    "--ncclep-inference-tokens",
    "more than the engine takes (`native`: 512), and without "
    "`inference_moe_token_dispatcher_type=ncclep`: leave it out",
)
def test_what_is_refused_at_build(ctx: RankContext) -> None:
    initialize(2)

    def build(case: InferenceCase, **changes: Any) -> None:
        """Build a layer; `changes` come after Megatron's own validation."""
        config = make_inference_config(case)
        vars(config).update(changes)
        moe_builder("cpu")(config=config, layer_number=1)

    for options, words in REFUSED_CONFIGS:
        with pytest.raises(UnsupportedError, match=words):
            make_inference_config(dataclasses.replace(CASE, options=options))
    words = r"=torch.float32: .* take only torch.bfloat16: set it"
    with pytest.raises(UnsupportedError, match=words):
        build(CASE, params_dtype=torch.float32)
    for caps, words in REFUSED_ENGINES:
        with (
            mock.patch.object(ReferenceEngine, "caps", dataclasses.replace(CAPS, **caps)),
            pytest.raises((InputError, EngineUnavailableError), match=words),
        ):
            # With a size of its own a layer gets its own session.
            build(dataclasses.replace(CASE, ncclep={"inference_tokens": 5}))
    with pytest.raises(
        UnsupportedError, match=r"inference_tokens=4, but .* is 'nccl', which would ignore"
    ):
        build(InferenceCase("nccl", trains="ncclep"))
    # Not refused: graphs of the whole model, in which training passes have no part.
    whole = {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}
    make_inference_config(InferenceCase(trains="ncclep", options=whole))


@pytest.mark.since("0.18")
@refuses(
    "cuda_graph_impl=local",
    "for inference, of more tokens than low-latency mode was set up for: have smaller graphs, or "
    "set `--ncclep-inference-tokens`",
)
def test_what_is_refused_of_batches(ctx: RankContext) -> None:
    layer = build_inference_layer(ctx, CASE)
    session = layer._inference_token_dispatcher.session
    rank = session.group.rank
    good = Batch.random(2, 1, layer.config, "cpu")
    # What a router gives that was made for training, on one rank; then rows and probabilities.
    for bad, words in (
        ({"topk": good.topk[:, :2]}, r"rank 1: the router gave .*\[2, 3\]"),
        ({"hidden": good.hidden.float()}, "rank 1: rows are torch.float32"),
        ({"probs": good.probs.bfloat16()}, "probabilities torch.bfloat16"),
    ):
        with pytest.raises(InputError, match=words):
            experts_of(layer, dataclasses.replace(good, **bad) if rank else good)
    assert experts_of(layer, good).shape == good.hidden.shape
    # A graph that Megatron has not announced, and a larger one.
    with mock.patch.object(type(session), "is_capturing", True):
        words = "graphs of 5 tokens on a rank, but low-latency mode was set up for 4: set"
        with pytest.raises(InputError, match=words):
            session.low_latency_for(5, None)
        assert session.low_latency_for(4, None) is not None
        with (
            mock.patch.object(session, "_low_latency", None),
            pytest.raises(UnsupportedError, match="before the first batch: run the model once be"),
        ):
            session.low_latency_for(4, None)
    with pytest.raises(InputError, match="takes at most 65536"):
        session.prepare(70000, 70000)


# --- Megatron's dynamic engine, as far as it needs no GPU ----------------------------------------


class NoPinnedMemory(torch.overrides.TorchFunctionMode):
    """Which a GPU would be needed for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` without it."""
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})


@pytest.mark.since("0.18")
def test_the_context_prepares_graphs_and_asks_for_failures(ctx: RankContext) -> None:
    """A step that is a CUDA graph makes tokens of NaN when a rank does not come."""
    # A session of its own.
    graphs = {**CASE.options, "cuda_graph_impl": "local"}
    case = dataclasses.replace(CASE, ncclep={"timeout_s": 51.0}, options=graphs)
    layer = build_inference_layer(ctx, case)
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    def context_of(config: Any, max_requests: int) -> Any:
        sizes = {"max_sequence_length": 64, "buffer_size_gb": 0.01, "block_size_tokens": 16}
        sizes |= {"max_requests": max_requests, "max_tokens": 256, "num_cuda_graphs": 2}
        with NoPinnedMemory():
            return DynamicInferenceContext(config, InferenceConfig(**sizes))

    session = layer._inference_token_dispatcher.session
    # The engine runs the largest batch before there are graphs.
    with watched_engine(layer) as plan:
        context = context_of(layer.config, 136)
    assert [call.args[0].tolist() for call in plan.mock_calls] == [[[-1] * 3] * 256]
    assert max(context.cuda_graph_token_counts) == 136
    assert session.max_tokens == session._low_latency.sizes.max_tokens == 136
    # With ours, as with Megatron's `nccl`, graphs hold decode steps only.
    assert not context.use_cuda_graphs_for_non_decode_steps
    assert layer.config.inference_moe_token_dispatcher_type == "ncclep"
    words = r"graphs of 144 tokens .* mode was set up for 136: .*--ncclep-inference-tokens 144"
    with pytest.raises(InputError, match=words):
        context_of(layer.config, 144)

    group = EpGroup.of(layer.ep_group)
    # With a failure on the device that no call has raised yet.
    failed = {"check.side_effect": PeerError("planted")}
    group.resources.share("planted", lambda: mock.Mock(Resource, **failed))
    with pytest.raises(PeerError, match="planted"):
        context.update_requests()
    other = context_of(make_inference_config(InferenceCase("nccl", options=graphs)), 144)
    assert not hasattr(other, "_ncclep_group")
    group.resources.release("planted", 60)
    session.close()
    batch = Batch.random(2, 1, layer.config, "cpu")
    with pytest.raises(GroupClosedError, match="closed"):
        experts_of(layer, batch)


def test_the_option_on_command_lines_and_in_older_releases(ctx: RankContext) -> None:
    initialize(2)
    import megatron.core
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    is_old = megatron.core.__version__.startswith(("0.16", "0.17"))
    field = "inference_moe_token_dispatcher_type"
    if is_old:
        words = r"Core 0\.1[67]\.\d.* has no dispatchers for inference.*0\.18"
        for kind in (TransformerConfig, MLATransformerConfig):
            with pytest.raises(UnsupportedError, match=words):
                kind(**{field: "ncclep"})
    if not has("training"):
        return  # this release's wheel has no command line
    from megatron.training import arguments

    def parsed(*flags: str) -> Any:
        with mock.patch.object(sys, "argv", ["x", *flags]):
            return arguments.parse_args()

    wanted = ("--inference-moe-token-dispatcher-type", "ncclep")
    if is_old:
        with mock.patch.object(sys, "stderr", io.StringIO()) as stderr, pytest.raises(SystemExit):
            parsed(*wanted)
        assert "has no dispatchers for inference to choose from: use 0.18" in stderr.getvalue()
        return
    assert parsed(*wanted, "--ncclep-inference-tokens", "9").ncclep_inference_tokens == 9
    assert TransformerConfig.ncclep == EpConfig(inference_tokens=9)
    TransformerConfig.ncclep = None
    for flags, text in (
        ((*wanted, "--ncclep-alignment", "16"), "--ncclep-alignment was given, but the dispatcher"),
        (
            ("--moe-token-dispatcher-type", "ncclep", "--ncclep-inference-tokens", "9"),
            "--ncclep-inference-tokens was given, but the inference dispatcher is 'nvls'",
        ),
    ):
        with pytest.raises(UnsupportedError, match=text):
            parsed(*flags)
