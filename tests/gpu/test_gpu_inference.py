"""Generating text on GPUs: a layer's experts and a whole layer, in CUDA graphs too, and a model."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from deselect import needs_te
from inference_case import (
    Batch,
    InferenceCase,
    build_gpt,
    build_inference_layer,
    experts_of,
    text_generated,
    use_whole_numbers,
)
from rank_pool import RankContext

from megatron_ncclep.ranks.group import EpGroup

pytestmark = [
    pytest.mark.needs_caps(test=lambda caps: caps.low_latency_tokens > 0 and caps.captures_static),
    needs_te,
]

OPTIONS: dict[str, Any] = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_moe_experts": 16,
    "moe_router_topk": 3,
    "use_cpu_initialization": False,
}
KERNELS = ("torch", "vllm")
MAX_TOKENS, NUM_REPLAYS, NUM_NEW = 16, 20, 8
# Tokens of rank r, from r on: some in low-latency mode, some through the engine.
TOKENS = (3, 0, MAX_TOKENS, 1, 5, 700, 64)


def case_of(kind: str, kernels: str, num_ranks: int, engine_name: str) -> InferenceCase:
    return InferenceCase(
        kind,
        ep=num_ranks,
        ncclep={"engine": engine_name, "inference_tokens": MAX_TOKENS},
        options={**OPTIONS, "inference_grouped_gemm_backend": kernels},
    )


def compile_nothing() -> None:
    """Before anything of Megatron is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it would compile takes longer than all the rest


def prepare_for_graphs(layer: Any) -> None:
    """What Megatron's dynamic context has done."""
    layer._inference_token_dispatcher.session.prepare(MAX_TOKENS, max(TOKENS))


def close(layer: Any) -> None:
    """Give up what graphs use: engines of later tests may need more memory than they had."""
    torch.cuda.synchronize()
    EpGroup.of(layer.ep_group).close()


@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    "transformer_impl=inference_optimized",
    compared="what experts of whole numbers make of batches of 0 to 700 tokens with their "
    "definition and with Megatron's dispatcher `nccl`, to the bit",
)
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(name, marks=pytest.mark.supports(f"inference_grouped_gemm_backend={name}"))
        for name in KERNELS
    ],
)
def test_experts_get_their_rows(ctx: RankContext, engine_name: str, kernels: str) -> None:
    compile_nothing()
    case = case_of("ncclep", kernels, ctx.num_ranks, engine_name)
    layer = build_inference_layer(ctx, case)
    theirs = build_inference_layer(ctx, case_of("nccl", kernels, ctx.num_ranks, engine_name))
    for built in (layer, theirs):
        use_whole_numbers(built)
    for round_, _ in enumerate(TOKENS):
        counts = [TOKENS[(round_ + rank) % len(TOKENS)] for rank in range(ctx.num_ranks)]
        batch = Batch.random(counts[ctx.rank], 100 * round_ + ctx.rank, layer.config, ctx.device)
        out = experts_of(layer, batch)
        assert torch.equal(out, batch.expected(OPTIONS["moe_ffn_hidden_size"])), (counts, ctx.rank)
        if min(counts) > 0 and ctx.num_ranks > 1:  # with one rank theirs has no number of rows
            assert torch.equal(out, experts_of(theirs, batch)), (counts, ctx.rank)


@pytest.mark.parametrize("kernels", KERNELS)
def test_graphs_are_replayed_with_other_tokens(
    ctx: RankContext, engine_name: str, kernels: str
) -> None:
    """Capture what follows the router once, and replay it with other tokens and routings."""
    compile_nothing()
    case = case_of("ncclep", kernels, ctx.num_ranks, engine_name)
    layer = build_inference_layer(ctx, case)
    use_whole_numbers(layer)
    held = Batch.random(MAX_TOKENS, 1, layer.config, ctx.device)
    prepare_for_graphs(layer)
    experts_of(layer, held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = experts_of(layer, held)
    for round_ in range(NUM_REPLAYS):
        batch = Batch.random(MAX_TOKENS, 100 * round_ + ctx.rank, layer.config, ctx.device)
        for name in ("hidden", "topk", "probs"):
            getattr(held, name).copy_(getattr(batch, name))
        graph.replay()
        assert torch.equal(out, batch.expected(OPTIONS["moe_ffn_hidden_size"])), round_
    # What was captured does not keep other batches from being taken.
    batch = Batch.random(3 + 60 * ctx.rank, ctx.rank, layer.config, ctx.device)
    expected = batch.expected(OPTIONS["moe_ffn_hidden_size"])
    assert torch.equal(experts_of(layer, batch), expected)
    graph.replay()
    close(layer)


def test_a_layer_in_a_graph_gives_the_bits_of_one_without(
    ctx: RankContext, engine_name: str
) -> None:
    """A decode loop of whole layers, router included, each step's output the next one's input."""
    compile_nothing()
    from megatron.core.inference.utils import InferenceMode

    layer = build_inference_layer(ctx, case_of("ncclep", "vllm", ctx.num_ranks, engine_name))
    generator = torch.Generator().manual_seed(ctx.rank)
    start = torch.randn(8, 1, OPTIONS["hidden_size"], generator=generator)
    held = start.bfloat16().to(ctx.device)
    prepare_for_graphs(layer)
    with torch.no_grad(), InferenceMode.active():
        layer(held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out, _ = layer(held)
        for _ in range(NUM_REPLAYS):
            expected, _ = layer(held)
            graph.replay()
            assert torch.equal(out, expected)
            # Of one size again, and in another order, so that routings change.
            held.copy_((expected / expected.float().norm(dim=2, keepdim=True) * 16).roll(1, 2))
    close(layer)


def generate_on_rank(ctx: RankContext, engine_name: str, kind: str) -> list[list[int]]:
    gpt = build_gpt(ctx, case_of(kind, "vllm", ctx.num_ranks, engine_name))
    with text_generated(gpt) as generate:
        # A prompt of one rank alone is longer than what low-latency mode takes.
        return [generate([7 + ctx.rank] * n, NUM_NEW) for n in (3, 5 + 20 * ctx.rank)]


@pytest.mark.needs_ranks(2)
@pytest.mark.supports(
    "inference_moe_token_dispatcher_type=ncclep",
    compared="the tokens that a model generates with those with Megatron's dispatcher `nccl`",
)
def test_tokens_are_those_of_nccl(ctx: RankContext, engine_name: str) -> None:
    compile_nothing()
    ours, theirs = (generate_on_rank(ctx, engine_name, kind) for kind in ("ncclep", "nccl"))
    assert ours == theirs
    assert [len(tokens) for tokens in ours] == [NUM_NEW] * 2
