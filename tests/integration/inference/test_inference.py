"""Generating text with Megatron-Core on a CPU: its own inference experts and engine, with ours and
its own dispatcher between the ranks.
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from types import SimpleNamespace
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
from megatron_setup import has, initialize

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import (
    EngineUnavailableError,
    GroupClosedError,
    InputError,
    PeerError,
    UnsupportedError,
)
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext

pytestmark = pytest.mark.each_release

CASE = InferenceCase(options={"moe_router_topk": 3})
FFN = 32
# Tokens of the two ranks of a group; low-latency mode takes 4.
SIZES = [(3, 4), (0, 2), (1, 0), (0, 0), (2, 9), (7, 0), (4, 4)]


def taken(session: Any) -> Any:
    """Note what takes each batch: True for low-latency mode."""
    choose, found = session.low_latency_for, []

    def low_latency_for(num_tokens: int, problem: str | None) -> Any:
        chosen = choose(num_tokens, problem)
        found.append(chosen is not None)
        return chosen

    return mock.patch.object(session, "low_latency_for", low_latency_for), found


@pytest.mark.since("0.18")
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    "transformer_impl=inference_optimized",
    "--ncclep-inference-tokens",
    compared="what experts of whole numbers make of batches of 0 to 9 tokens with their definition "
    "and with Megatron's dispatcher `nccl`, to the bit",
)
def test_experts_get_their_rows(ctx: RankContext) -> None:
    """Batches of 0 tokens on one rank or on all, and such as are too large on one rank."""
    from megatron.core import parallel_state

    layer = build_inference_layer(ctx, CASE)
    theirs = build_inference_layer(ctx, dataclasses.replace(CASE, kind="nccl"))
    for built in (layer, theirs):
        use_whole_numbers(built)
    rank = parallel_state.get_expert_model_parallel_rank()
    dispatcher = layer._inference_token_dispatcher
    patch, found = taken(dispatcher.session)
    with patch:
        for round_, sizes in enumerate(SIZES):
            batch = Batch.random(sizes[rank], 10 * round_ + ctx.rank, layer.config, "cpu")
            out = experts_of(layer, batch)
            assert torch.equal(out, batch.expected(FFN)), (sizes, rank)
            if sum(sizes):  # Megatron's kernels want a row
                assert torch.equal(out, experts_of(theirs, batch)), (sizes, rank)
            # Nothing is kept from one pass to the next.
            kept = ("_low_latency", "_plan", "_num_valid", "_others", "routing_map")
            assert [getattr(dispatcher, name) for name in kept] == [None] * len(kept)
    assert found == [max(sizes) <= 4 for sizes in SIZES]


@pytest.mark.since("0.18")
def test_one_assignment(ctx: RankContext) -> None:
    """For top-1 Megatron's router makes [tokens], not [tokens, 1]; its own dispatchers fail."""
    from megatron.core.inference.utils import InferenceMode

    options = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    layer = build_inference_layer(ctx, dataclasses.replace(CASE, options=options))
    hidden = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(ctx.rank)).bfloat16()
    with torch.no_grad(), InferenceMode.active():
        probs, topk = layer.router(hidden)
        assert (probs.shape, topk.shape) == ((3,), (3,))
        out, _ = layer(hidden)
    batch = Batch(hidden[:, 0], topk[:, None], probs[:, None])
    assert out.shape == hidden.shape
    assert torch.equal(out[:, 0], experts_of(layer, batch))


def training_on_rank(ctx: RankContext, case: InferenceCase) -> list[torch.Tensor]:
    """Outputs and gradients of two micro-batches, with text generated before each."""
    from megatron.core.inference.utils import InferenceMode

    layer = build_inference_layer(ctx, case)
    results = []
    generator = torch.Generator().manual_seed(ctx.rank)
    for without_gradients in (torch.inference_mode, torch.no_grad):
        x = torch.randn(6, 2, 16, generator=generator).bfloat16().requires_grad_()
        if case.kind == "ncclep":
            with without_gradients(), InferenceMode.active():
                layer.eval()(x[:2, :1])
            assert type(layer.token_dispatcher).__name__ == "NcclEpInferenceDispatcher"
        layer.train()
        out, _ = layer(x)
        assert (type(layer.token_dispatcher).__name__ == "NcclEpTokenDispatcher") == (
            case.trains == "ncclep"
        )
        out.sum().backward()
        results += [out.detach(), x.grad.clone()]
    return [*results, *(p.grad for p in layer.parameters())]


@pytest.mark.since("0.18")
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    compared="outputs and gradients of training passes between those that generate text with "
    "alltoall's, which generates none, to the bit",
)
def test_training_passes_take_the_other_dispatcher(ctx: RankContext) -> None:
    # With two assignments of a token, sums have two terms.
    ours = training_on_rank(ctx, InferenceCase(trains="ncclep"))
    theirs = training_on_rank(ctx, InferenceCase("nccl"))
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)


PROMPTS = (3, 6), (8, 2)
NUM_NEW = 6


def generate_on_rank(ctx: RankContext, kind: str) -> tuple[list[list[int]], list[bool]]:
    gpt = build_gpt(ctx, InferenceCase(kind))
    found: list[bool] = []
    with text_generated(gpt) as generate:
        lengths = PROMPTS[ctx.rank % 2]
        prompts = [[(5 * ctx.rank + 7 * i * i + 3) % 47 for i in range(n)] for n in lengths]
        if kind == "nccl":
            return [generate(prompt, NUM_NEW) for prompt in prompts], found
        layer = gpt.decoder.layers[0].mlp
        patch, found = taken(layer._inference_token_dispatcher.session)
        with patch:
            return [generate(prompt, NUM_NEW) for prompt in prompts], found


@pytest.mark.since("0.18")
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    compared="the tokens that a model generates with those with Megatron's dispatcher `nccl`",
)
def test_tokens_are_those_of_nccl(ctx: RankContext) -> None:
    """Two prompts one after the other on each rank, of other lengths than on the other one."""
    tokens, found = generate_on_rank(ctx, "ncclep")
    assert tokens == generate_on_rank(ctx, "nccl")[0]
    assert [len(prompt) for prompt in tokens] == [NUM_NEW] * 2
    # Two layers: a prompt that is too long on one rank, and then single tokens.
    one = [False] * 2 + [True] * 2 * (NUM_NEW - 1)
    assert found == one * 2


# --- what is refused -----------------------------------------------------------------------------


def text_of(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def refusals() -> dict[str, str]:
    initialize(2)
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ncclep.integration.inference import session as inference_exchange

    def build(case: InferenceCase = CASE, **changes: Any) -> str:
        config = make_inference_config(case)
        vars(config).update(changes)  # after Megatron's own validation
        layer = lambda: moe_builder("cpu")(config=config, layer_number=1)  # noqa: E731
        return text_of((UnsupportedError, InputError, EngineUnavailableError), layer)

    def config(**options: Any) -> str:
        case = dataclasses.replace(CASE, options=options)
        return text_of(UnsupportedError, lambda: make_inference_config(case))

    def engine(**caps: Any) -> str:
        """With an engine that can do less than `reference`."""
        create = inference_exchange.create_engine

        def less(*args: Any) -> Any:
            made = create(*args)
            made.caps = dataclasses.replace(made.caps, **caps)
            return made

        # A session of its own: what others of this group share is there already.
        case = dataclasses.replace(CASE, ncclep={"inference_tokens": 5})
        with mock.patch.object(inference_exchange, "create_engine", less):
            return build(case)

    found = {
        "impl": config(transformer_impl="local"),
        "dense": text_of(
            UnsupportedError,
            lambda: TransformerConfig(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=1,
                normalization="RMSNorm",
                add_bias_linear=False,
                transformer_impl="inference_optimized",
                inference_moe_token_dispatcher_type="ncclep",
            ),
        ),
        "dtype": build(params_dtype=torch.float32),
        "backend": config(inference_grouped_gemm_backend="flashinfer"),
        "no mode": engine(low_latency_tokens=0),
        "few tokens": engine(low_latency_tokens=2),
        "few assignments": engine(max_top_k=2),
        "row bytes": engine(row_bytes_multiple=64),
    }
    # What is not: graphs of the whole model, in which training passes have no part.
    whole = {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}
    make_inference_config(InferenceCase(trains="ncclep", options=whole))
    ignored = InferenceCase("nccl", trains="ncclep")
    found["ignored"] = build(ignored)
    return found


REFUSED = {
    "impl": "with transformer_impl='local' and num_moe_experts=8: Megatron-Core has dispatchers",
    "dense": "with transformer_impl='inference_optimized' and num_moe_experts=None: Megatron-Core",
    "dtype": "does not support params_dtype=torch.float32: .* take torch.bfloat16 only: set it",
    "backend": "inference_grouped_gemm_backend='flashinfer': .* set 'vllm' or 'torch'",
    "no mode": "needs low-latency mode, and engine 'reference' has none: where engine 'native' can",
    "few tokens": "max_tokens 5: low-latency mode of 'reference' takes 1 to 2",
    "few assignments": "top_k 3: low-latency mode of 'reference' takes 1 to 2",
    "row bytes": "a row has 32 bytes: engine 'reference' needs a multiple of 64",
    "ignored": "inference_tokens=4, but inference_moe_token_dispatcher_type is 'nccl', which would "
    "ignore it: leave it out",
}


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
    found = refusals()
    assert found.keys() == REFUSED.keys()
    for name, text in found.items():
        assert re.search(REFUSED[name], text), text


@pytest.mark.since("0.18")
@refuses(
    "cuda_graph_impl=local",
    "for inference, of more tokens than low-latency mode was made for: have smaller graphs, or set "
    "`--ncclep-inference-tokens`",
)
def test_what_is_refused_of_batches(ctx: RankContext) -> None:
    layer = build_inference_layer(ctx, CASE)
    session = layer._inference_token_dispatcher.session
    rank, text = session.group.rank, ""
    good = Batch.random(2, 1, layer.config, "cpu")
    # What a router gives that was made for training, on one rank; then rows and probabilities.
    for bad, words in (
        (dataclasses.replace(good, topk=good.topk[:, :2]), r"rank 1: the router gave .*\[2, 3\]"),
        (dataclasses.replace(good, hidden=good.hidden.float()), "rank 1: rows are torch.float32"),
        (dataclasses.replace(good, probs=good.probs.bfloat16()), "probabilities torch.bfloat16"),
    ):
        text = text_of(InputError, lambda bad=bad: experts_of(layer, bad if rank else good))
        assert re.search(words, text), text
    assert experts_of(layer, good).shape == good.hidden.shape
    # A graph that Megatron has not announced, and a larger one.
    with mock.patch.object(type(session), "is_capturing", True):
        text = text_of(InputError, lambda: session.low_latency_for(5, None))
        assert "graphs of 5 tokens on a rank, but low-latency mode was made for 4: set" in text
        assert session.low_latency_for(4, None) is not None
        opened, session._low_latency = session._low_latency, None
        text = text_of(UnsupportedError, lambda: session.low_latency_for(4, None))
        assert "before the first batch: run the model once before" in text
        session._low_latency = opened
    session.prepare(4, 4)
    assert "--ncclep-inference-tokens 5" in text_of(InputError, lambda: session.prepare(5, 5))
    assert "takes at most 65536" in text_of(InputError, lambda: session.prepare(70000, 70000))


# --- Megatron's dynamic engine, as far as it needs no GPU ----------------------------------------


class Context:
    """What DynamicInferenceContext is to the hooks, of a model without expert parallelism."""

    def __init__(self, model_config: Any, inference_config: Any) -> None:
        self.shown = model_config.inference_moe_token_dispatcher_type
        self.expert_model_parallel_group = None
        self.cuda_graph_token_counts = inference_config
        self.max_tokens = 300
        self.num_updates = 0

    def update_requests(self) -> None:
        """Count the steps."""
        self.num_updates += 1


class NoPinnedMemory(torch.overrides.TorchFunctionMode):
    """Which a GPU would be needed for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` without it."""
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})


class Planted:
    """What engines share, with a failure on the device that no call has raised yet."""

    def check(self) -> None:
        raise PeerError("planted")

    def close(self) -> None:
        """Nothing to give back."""


@pytest.mark.since("0.18")
def test_the_context_prepares_graphs_and_asks_for_failures(ctx: RankContext) -> None:
    """A step that is a CUDA graph makes tokens of NaN when a rank does not come."""
    from megatron_ncclep.integration.inference.support import change_inference_context
    from megatron_ncclep.integration.patching import is_changed

    # A session of its own.
    graphs = {**CASE.options, "cuda_graph_impl": "local"}
    case = dataclasses.replace(CASE, ncclep={"timeout_s": 51.0}, options=graphs)
    layer = build_inference_layer(ctx, case)
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    # Megatron's own: with ours, as with its `nccl`, graphs hold decode steps only.
    assert is_changed(DynamicInferenceContext.update_requests)
    config = InferenceConfig(
        max_sequence_length=64,
        buffer_size_gb=0.01,
        max_requests=136,
        max_tokens=256,
        num_cuda_graphs=2,
        block_size_tokens=16,
    )
    with NoPinnedMemory():
        real = DynamicInferenceContext(layer.config, config)
    assert max(real.cuda_graph_token_counts) == 136
    assert not real.use_cuda_graphs_for_non_decode_steps
    assert layer._inference_token_dispatcher.session.max_tokens == 136
    assert layer.config.inference_moe_token_dispatcher_type == "ncclep"

    case = dataclasses.replace(CASE, ncclep={"timeout_s": 50.0})
    layer = build_inference_layer(ctx, case)
    change_inference_context(SimpleNamespace(__name__="x", DynamicInferenceContext=Context))
    session = layer._inference_token_dispatcher.session
    assert session.max_tokens == 128
    # The engine runs the largest batch before there are graphs.
    plan = mock.Mock(wraps=session.engine.plan)
    with mock.patch.object(session.engine, "plan", plan):
        context: Any = Context(layer.config, [200, 8])
    assert [call.args[0].tolist() for call in plan.mock_calls] == [[[-1] * 3] * 300]
    assert (context.shown, layer.config.inference_moe_token_dispatcher_type) == ("nccl", "ncclep")
    assert session.max_tokens == session._low_latency.sizes.max_tokens == 200
    assert session.all_places.tolist() == [400]
    with mock.patch.object(session.engine, "plan", None):
        Context(layer.config, None)
    text = text_of(InputError, lambda: Context(layer.config, [201]))
    assert "graphs of 201 tokens on a rank, but low-latency mode was made for 200" in text
    context.update_requests()
    group = context._ncclep_group
    assert group is EpGroup.of(layer.ep_group)
    group.share("planted", Planted)
    with pytest.raises(PeerError, match="planted"):
        context.update_requests()
    other: Any = Context(make_inference_config(InferenceCase("nccl")), [900])
    other.update_requests()
    assert (context.num_updates, other.num_updates, other.shown) == (1, 1, "nccl")
    group.release("planted", 60)
    session.close()
    batch = Batch.random(2, 1, layer.config, "cpu")
    assert "closed" in text_of(GroupClosedError, lambda: experts_of(layer, batch))


def test_the_option_on_command_lines_and_in_older_releases(ctx: RankContext) -> None:
    initialize(2)
    import megatron.core
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    is_old = megatron.core.__version__.startswith(("0.16", "0.17"))
    field = "inference_moe_token_dispatcher_type"
    if is_old:
        for kind in (TransformerConfig, MLATransformerConfig):
            text = text_of(UnsupportedError, lambda kind=kind: kind(**{field: "ncclep"}))
            assert re.search(r"Core 0\.1[67]\.\d.* has no dispatchers for inference.*0\.18", text)
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
        assert "has no dispatchers for inference to choose from: take 0.18" in stderr.getvalue()
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
