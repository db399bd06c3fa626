"""Adapters on TransformerEngine's experts, with grouped ones: the table of
tests/integration/adapted_experts.py on a GPU, CUDA graphs, and Megatron-Bridge's own adapters.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from adapted_experts import ADAPTED, change, of_bridge, wrap
from changed_experts import GPU_FIELDS, Change, train
from deselect import needs_te
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig

# Of the largest value: as in test_gpu_grouped_experts.py.
TOLERANCE = 2e-2
# Those of one module for all experts, which TEGroupedMLP is.
NAMES = [name for name, (is_one, _) in ADAPTED.items() if is_one]


def compare(ctx: RankContext, engine: str, adapted: Change, **options: Any) -> None:
    """Two micro-batches beside Megatron's experts."""
    with_theirs = EpConfig(engine=engine, experts="megatron", alignment=16)
    expected, _, _ = train(adapted, with_theirs, "cuda", True, ctx.rank, **GPU_FIELDS)
    ours = EpConfig(engine=engine, experts="grouped", **options)
    found, _, said = train(adapted, ours, "cuda", True, ctx.rank, **GPU_FIELDS)
    assert not any("Megatron's experts compute" in line for line in said)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        mine = found[key]
        if value is None or mine is None:
            assert value is mine is None, key
            continue
        error = (mine.float() - value.float()).abs().max()
        assert error <= TOLERANCE * value.float().abs().max(), key


@needs_te
@pytest.mark.parametrize("name", NAMES)
def test_adapters(ctx: RankContext, engine_name: str, name: str) -> None:
    _, adapted = ADAPTED[name]
    compare(ctx, engine_name, adapted)


@needs_te
@pytest.mark.parametrize("kind", ["shared", "of each", "half shared"])
def test_static_mode(ctx: RankContext, engine_name: str, kind: str) -> None:
    """Rows after the last block hold anything there."""
    compare(ctx, engine_name, change(of_bridge(kind), fuses=kind == "of each"), max_recv_rows=1024)


@needs_te
@pytest.mark.alone
def test_a_graph_of_the_experts(ctx: RankContext) -> None:
    """Forward and backward are captured once and replayed with other rows in other blocks."""
    from megatron_setup import build_layer, initialize, make_config

    initialize(ep=1, device="cuda")
    config = make_config(
        "ncclep",
        torch.bfloat16,
        1,
        ncclep=EpConfig(experts="grouped", max_recv_rows=512),
        **GPU_FIELDS,
    )
    layer = build_layer(config, "cuda", te=True)
    wrap(layer, [], of_bridge("of each"))
    experts = layer.experts
    assert experts.as_built.change() is None
    factors = [weight for weight in experts.parameters() if weight.requires_grad]
    number, size = config.num_moe_experts, 512

    def draw(*shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
        return values.bfloat16()

    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        counts = 16 * torch.randint(0, 4, (number,), generator=generator)
        rows = draw(size, config.hidden_size, seed=seed)
        rows[int(counts.sum()) :] = torch.nan
        return rows, counts.cuda(), draw(size, seed=seed + 100).float().abs()

    rows, counts, probs = inputs(0)
    grad = draw(size, config.hidden_size, seed=7)

    def step() -> torch.Tensor:
        for factor in factors:
            factor.grad = None
        out: torch.Tensor = experts(rows, counts, probs)[0]
        out.backward(grad)
        return out

    def results(out: torch.Tensor) -> list[torch.Tensor]:
        used = int(counts.sum())
        return [out[:used].clone(), *(factor.grad.clone() for factor in factors)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    kept = [factor.grad for factor in factors]
    for seed in (1, 2):
        for buffer, value in zip((rows, counts, probs), inputs(seed), strict=True):
            buffer.copy_(value)
        graph.replay()
        for factor, gradient in zip(factors, kept, strict=True):
            factor.grad = gradient
        replayed = results(captured)
        assert all(map(torch.equal, replayed, results(step())))


@needs_te
@pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed"
)
@pytest.mark.parametrize(
    "options", [{}, {"share_expert_adapters": False}, {"experts_shared_outer_loras": True}], ids=str
)
def test_megatron_bridge(ctx: RankContext, engine_name: str, options: dict[str, Any]) -> None:
    """Its own adapters, as its LoRA puts them on."""
    compare(ctx, engine_name, Change(partial(put_on, options=options), fuses=False))


def put_on(layer: Any, seen: Any, options: dict[str, Any]) -> None:
    from megatron.bridge.peft.lora import LoRA

    model = torch.nn.Module()
    model.mlp = layer
    torch.manual_seed(5)
    LoRA(["linear_fc1", "linear_fc2"], dim=8, alpha=16, lora_B_init_method="normal", **options)(
        model
    )
