"""Grouped experts on GPUs: against TransformerEngine's, without the host, and in a CUDA graph.

What needs TransformerEngine is skipped, by name, where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deselect import needs_te
from megatron_setup import build_layer, initialize, make_config
from on_ranks import gathered
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError

HIDDEN, FFN, EXPERTS, TOP_K = 256, 192, 16, 2
OPTIONS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "moe_ffn_hidden_size": FFN,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "bias_activation_fusion": True,
    "use_cpu_initialization": False,
}
TE_OPTIONS = {"moe_grouped_gemm": True, "gradient_accumulation_fusion": True}
# Rows, hidden rows, activations and outputs are rounded to bf16, which moves them by 2^-9 of their
# size; sums have at most 512 terms and are made in fp32, in both.  A sum that falls on the other
# side of such a rounding differs by 2^-8, four of them by less than 2e-2 of the largest value.
# Our weight gradients are rounded once for each micro-batch, TransformerEngine's not: 2^-9 more.
TOLERANCE = 2e-2


def build(ep: int, use_te: bool, ncclep: EpConfig, **options: Any) -> Any:
    """One MoELayer in bf16 on this rank's GPU, with experts that all differ."""
    initialize(ep, device="cuda")
    values = {**OPTIONS, **(TE_OPTIONS if use_te else {}), **options}
    config = make_config("ncclep", torch.bfloat16, ep, ncclep=ncclep, **values)
    return build_layer(config, "cuda", use_te)


def in_ddp(layer: Any) -> Any:
    """Megatron's DDP with the buffers of the distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wrapped = DistributedDataParallel(
        layer.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        layer,
    )
    wrapped.zero_grad_buffer()
    return wrapped


def train_on_rank(
    ctx: RankContext, engine_name: str, experts: str, tokens: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Two micro-batches: everything that comes out, by name."""
    layer = build(ctx.num_ranks, True, EpConfig(engine=engine_name, experts=experts), **options)
    wrapped = in_ddp(layer)
    results: dict[str, Any] = {"class": type(layer.experts).__name__}
    for micro_batch in range(2):
        generator = torch.Generator().manual_seed(10 * micro_batch + ctx.rank)
        hidden, probe = (
            torch.randn(tokens, 1, HIDDEN, generator=generator).to("cuda", torch.bfloat16)
            for _ in range(2)
        )
        out, _ = wrapped(hidden.requires_grad_())
        out.backward(probe)
        results[f"output {micro_batch}"] = out.detach()
        results[f"input gradient {micro_batch}"] = hidden.grad
    for name, parameter in layer.named_parameters():
        results[f"main_grad of {name}"] = parameter.main_grad.clone()
    if experts == "grouped":
        from megatron_ncclep.integration.experts.expert_stack import view_of

        for linear in ("linear_fc1", "linear_fc2"):
            weights = layer.experts.weights_of(linear)
            assert view_of(weights) is not None
            assert view_of([weight.main_grad for weight in weights]) is not None
    layer.token_dispatcher.engine.close()
    return {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in results.items()}


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}


@needs_te
@pytest.mark.supports(
    "--ncclep-experts=grouped",
    "transformer_impl=transformer_engine",
    compared="outputs and all gradients with TransformerEngine's experts, within rounding",
)
@pytest.mark.parametrize(
    ("tokens", "options"),
    [(200, {}), (3, {}), (200, RECOMPUTED)],  # 3 tokens: most experts have none
    ids=["full", "empty-experts", "moe-act"],
)
def test_layer_equals_transformer_engines(
    ctx: RankContext, engine_name: str, tokens: int, options: dict[str, Any]
) -> None:
    mine = train_on_rank(ctx, engine_name, "grouped", tokens, options)
    other = train_on_rank(ctx, engine_name, "megatron", tokens, options)
    assert (mine.pop("class"), other.pop("class")) == ("GroupedTEExperts", "TEGroupedMLP")
    assert mine.keys() == other.keys()
    trained = 0
    for name, expected in other.items():
        scale = expected.abs().max().item()
        error = (mine[name].float() - expected.float()).abs().max().item()
        assert error <= TOLERANCE * scale, f"{name}: {error} of {scale}"
        trained += "experts" in name and scale > 0
    assert sum(gathered(ctx, trained)) >= 4  # not zeros against zeros


# ---- the experts alone: no host, and a graph


class Static:
    """Experts of one rank over tensors that stay where they are, and one forward and backward."""

    ROWS = 1024

    def __init__(self, ctx: RankContext, use_te: bool) -> None:
        layer = build(
            ctx.num_ranks,
            use_te,
            EpConfig(experts="grouped"),
            # The local layers' fused kernel is Apex's; the experts need none.
            **({} if use_te else {"gradient_accumulation_fusion": False}),
        )
        layer.token_dispatcher.engine.close()
        self.experts = layer.experts
        self.experts.config.gradient_accumulation_fusion = True
        self.num_experts = layer.num_local_experts
        self.rows = torch.zeros(self.ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.grad = torch.zeros_like(self.rows)
        self.probs = torch.zeros(self.ROWS, device="cuda")
        self.rows.requires_grad_()
        self.probs.requires_grad_()
        self.counts = torch.zeros(self.num_experts, device="cuda", dtype=torch.int64)
        self.main_grads = []
        for linear in ("linear_fc1", "linear_fc2"):
            weights = self.experts.weights_of(linear)
            buffer = torch.zeros(len(weights), *weights[0].shape, device="cuda")
            for weight, main_grad in zip(weights, buffer, strict=True):
                weight.main_grad = main_grad
            self.main_grads.append(buffer)

    def fill(self, number: int) -> int:
        """Make the inputs those of micro-batch `number`; return how many rows belong to someone.

        NaN after them, in the rows and in the gradient.
        """
        generator = torch.Generator().manual_seed(number)
        sizes = 16 * torch.randint(0, self.ROWS // 16 // self.num_experts, (self.num_experts,),
                                   generator=generator)  # fmt: skip
        sizes[number % self.num_experts] = 0
        used = int(sizes.sum())
        with torch.no_grad():
            self.counts.copy_(sizes)
            for tensor in (self.rows, self.grad, self.probs):
                values = torch.randn(tensor.shape, generator=generator)
                values[used:] = torch.nan
                tensor.copy_(values)
        return used

    def step(self, counts: torch.Tensor) -> list[torch.Tensor]:
        """Output, gradients of rows and probabilities, and the main_grads."""
        self.rows.grad = self.probs.grad = None
        for buffer in self.main_grads:
            buffer.zero_()
        out, _ = self.experts(self.rows, counts, self.probs)
        out.backward(self.grad)
        assert self.rows.grad is not None
        assert self.probs.grad is not None
        return [out.detach(), self.rows.grad, self.probs.grad, *self.main_grads]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make torch raise wherever the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def differences(found: list[torch.Tensor], expected: list[torch.Tensor], used: int) -> list[str]:
    """Names of what differs in a bit, or is not finite, in rows that belong to someone."""
    names = ("output", "rows' gradient", "probabilities' gradient", "fc1's", "fc2's")
    problems = []
    for name, a, b in zip(names, found, expected, strict=True):
        if len(a) == Static.ROWS:
            a, b = a[:used], b[:used]
        if not torch.equal(a, b) or not torch.isfinite(a).all():
            problems.append(name)
    return problems


each_linear = pytest.mark.parametrize(
    "use_te", [False, pytest.param(True, marks=needs_te)], ids=["local", "te"]
)


@each_linear
def test_the_host_never_waits(ctx: RankContext, use_te: bool) -> None:
    """Counts on the device and on the host: the same bits, and no wait in either."""
    static = Static(ctx, use_te)
    static.fill(0)
    static.step(static.counts)  # compiles the activation
    none, _ = static.experts(static.rows[:0], torch.zeros_like(static.counts), static.probs[:0])
    none.backward(static.grad[:0])
    assert none.shape == (0, HIDDEN)
    for number in range(4):
        used = static.fill(number)
        on_host = static.counts.cpu()
        torch.cuda.synchronize()
        with no_synchronisation():
            expected = [tensor.clone() for tensor in static.step(static.counts)]
            found = static.step(on_host)
        assert differences(found, expected, used) == [], number
        # Against one product for each expert, in fp32.
        ends = on_host.cumsum(0).tolist()
        fc1, fc2 = (static.experts.weights_of(linear) for linear in ("linear_fc1", "linear_fc2"))
        for i, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            rows = static.rows.detach()[begin:end].float()
            gate, value = (rows @ fc1[i].detach().float().t()).chunk(2, dim=-1)
            hidden = F.silu(gate) * value * static.probs.detach()[begin:end, None]
            wanted = hidden @ fc2[i].detach().float().t()
            if begin < end:
                error = (found[0][begin:end].float() - wanted).abs().max()
                assert error <= TOLERANCE * wanted.abs().max(), (number, i, error)
            else:  # an expert without rows
                assert not static.main_grads[0][i].any()
                assert not static.main_grads[1][i].any()


def test_other_dtypes_are_refused(ctx: RankContext, engine_name: str) -> None:
    initialize(ctx.num_ranks, device="cuda")
    text = "has kernels for bf16, and the experts compute in torch.float32"
    with pytest.raises(UnsupportedError, match=text):
        build(ctx.num_ranks, False, EpConfig(engine=engine_name, experts="grouped"),
              params_dtype=torch.float32, bf16=False)  # fmt: skip
