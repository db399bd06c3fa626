"""vLLM's layers over our backend: its own classes and calls, on a CPU, with the reference engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import real_vllm
import torch
from patience import PatientPool

from megatron_ncclep.errors import InputError, IntegrationError, PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext

NUM_LOCAL, TOP_K, HIDDEN, BLOCK = 3, 2, 256, 128
# More than low-latency mode has in the fourth batch, on one rank.
BATCHES = ((6, 0), (3, 8), (9, 33), (2, 513), (0, 0), (700, 600))


@pytest.fixture(scope="module", params=real_vllm.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Two ranks, on which the tests run (tests/on_ranks.py): new ones for each release.
@pytest.fixture(scope="module")
def ctx(release: str) -> Iterator[PatientPool]:
    with closing(PatientPool(2, folders=[str(Path(__file__).parent)])) as made:
        yield made


def batch(number: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Numbers whose products and sums are exact in every dtype here."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randint(-2, 3, (BATCHES[number][rank], HIDDEN), generator=generator).to(dtype) * 4
    scores = torch.rand(len(x), NUM_LOCAL * 2, generator=generator)
    assignments = scores.argsort(dim=1)[:, :TOP_K].int()
    assignments[torch.rand(assignments.shape, generator=generator) < 0.2] = -1
    weights = 0.5 ** torch.randint(0, 3, assignments.shape, generator=generator)
    return x, assignments, weights


def quantized(a: torch.Tensor, scale: Any, **given: Any) -> Any:
    """Stands for vLLM's kernel; divides blocks by 1, 2, 1, 2: exact, and different."""
    blocks = a.float().view(len(a), HIDDEN // BLOCK, BLOCK)
    scales = (2.0 ** (torch.arange(blocks.shape[1]) % 2)).expand(len(a), -1).contiguous()
    return (blocks / scales[:, :, None]).view(a.shape).to(torch.float8_e4m3fn), scales


def make_kernel(ctx: RankContext, release: str, kind: str, dtype: torch.dtype, **asked: Any) -> Any:
    """A layer's kernel, made as vLLM makes it, and its experts."""
    pairs = real_vllm.load(release, ctx.group)
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    moe = real_vllm.moe_config(
        NUM_LOCAL, ctx.num_ranks, ctx.rank, experts_per_token=TOP_K, hidden_dim=HIDDEN,
        max_num_tokens=700, in_dtype=dtype, **asked,
    )  # fmt: skip
    quant = quant_config(kind)
    pair = pairs.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
    experts = real_vllm.experts_class()(moe, quant)
    experts.defers = kind == "deferred"
    return mk.FusedMoEKernel(pair, experts), experts


def quant_config(kind: str) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    if kind == "plain":
        return FusedMoEQuantConfig.make()
    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[BLOCK, BLOCK])


def forward(ctx: RankContext, kernel: Any, number: int, dtype: torch.dtype) -> torch.Tensor:
    """One call of a layer, in vLLM's context of a forward pass; returns its output."""
    from vllm import forward_context as contexts

    x, assignments, weights = batch(number, ctx.rank, dtype)
    metadata = contexts.DPMetadata(torch.tensor(BATCHES[number]))
    context = mock.Mock(dp_metadata=metadata)
    first, total = ctx.rank * NUM_LOCAL, NUM_LOCAL * ctx.num_ranks
    expert_map = torch.full((total,), -1, dtype=torch.int32)
    expert_map[first : first + NUM_LOCAL] = torch.arange(NUM_LOCAL, dtype=torch.int32)
    w1, w2 = torch.empty(NUM_LOCAL, 128, HIDDEN), torch.empty(NUM_LOCAL, HIDDEN, 64)
    with contexts.override_forward_context(context), metadata.sp_local_sizes(1):
        return kernel.apply(
            x, w1, w2, topk_weights=weights, topk_ids=assignments,
            activation=kernel.moe_config.activation, global_num_experts=total,
            expert_map=expert_map, apply_router_weight_on_input=False,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "fp8", "deferred"])
def test_a_layers_output(ctx: RankContext, release: str, kind: str) -> None:
    """Two layers in turns, as a model has them, and batches of both modes."""
    real_vllm.load(release, ctx.group)
    from megatron_ncclep.vllm import modes, pair

    dtype = torch.bfloat16 if kind == "fp8" else torch.float32
    made = [make_kernel(ctx, release, kind, dtype) for _ in range(2)]
    used = []
    for number in range(len(BATCHES)):
        kernel, experts = made[number % 2]
        with mock.patch.object(pair, "moe_kernel_quantize_input", quantized):
            out = forward(ctx, kernel, number, dtype)
        x, assignments, weights = batch(number, ctx.rank, dtype)
        factors = torch.where(assignments >= 0, (assignments + 1) * weights, 0).sum(1, keepdim=True)
        assert torch.equal(out.float(), x.float() * factors), f"batch {number}"
        every = torch.cat([batch(number, rank, dtype)[1] for rank in (0, 1)])
        first = ctx.rank * NUM_LOCAL
        counts = [int((every == expert).sum()) for expert in range(first, first + NUM_LOCAL)]
        if any(counts):
            assert experts.seen == counts
        used.append(kernel.prepare_finalize._mode_for(max(BATCHES[number])))
    few = [mode._calls.sizes.max_tokens for mode in used if isinstance(mode, modes.FewTokens)]
    assert few == [8, 8, 128, 8]
