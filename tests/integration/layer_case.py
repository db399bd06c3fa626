"""One MoELayer trained with a dispatcher of choice, and the comparison of two such trainings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, EXPERTS, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from on_ranks import gathered

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext

# fp64 sums of at most 9 terms of size ~1 in two orders differ by ~1e-15; 1e-12 leaves room for the
# weight gradients, which add up ~100 products.  fp32: the same with 2^-24 instead of 2^-53.  bf16:
# alltoall adds the K terms of a token up in bf16 or fp32 depending on version, we round once per
# rank: a few units of 2^-8 of the largest terms.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class LayerCase:
    """One layer configuration; `options` are TransformerConfig fields."""

    name: str
    ep: int = 4
    tp: int = 1
    # Ranks that hold slices of one expert.
    etp: int = 1
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    # All forwards before the first backward, as pipelines do: as many plans are alive.
    in_flight: bool = False
    # Whole numbers so small that every sum of them is exact: results must be the same bits.
    integers: bool = False
    # TransformerEngine's modules instead of Megatron's own.
    te: bool = False
    # The ranks count as several machines, with so many on each.
    local_ranks: int | None = None
    # Sequence length of each rank; ranks of one tensor-parallel group must agree.
    sequences: tuple[int, ...] = (SEQUENCE,) * 4
    batch: int = BATCH
    # Positions at the end of each sequence that the router is told are padding.
    padding: int = 0
    # The output's gradient is a view, as that of packed sequences whose samples are a dimension.
    transposed: bool = False
    # Of an evaluation before each micro-batch; the ranks of a tensor-parallel group have the same
    # tokens then, as where a model generates text.
    evaluation: tuple[int, ...] = ()
    # Megatron pads experts to capacity in evaluations, as it does where a CUDA graph decodes.
    pads_decoding: bool = False
    # Results are the same bits: each sum of rows has at most two terms, and sums over an expert's
    # rows the same order.
    same_bits: bool = False
    # The Megatron-Core release that has the options.
    since: str = "0.16"
    # What it shows beside its options.
    shows: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int:
        return self.options.get("num_moe_experts", EXPERTS)

    @property
    def experts(self) -> tuple[str, str]:
        """The classes of our layer's experts and of the other's."""
        theirs = "SequentialMLP"
        if self.te and self.options.get("moe_grouped_gemm"):
            is_for_inference = self.options.get("transformer_impl") == "inference_optimized"
            theirs = "InferenceGroupedMLP" if is_for_inference else "TEGroupedMLP"
        ncclep = self.options.get("ncclep")
        is_grouped = ncclep is not None and ncclep.experts == "grouped"
        grouped = "GroupedTEExperts" if self.te else "GroupedLocalExperts"
        return grouped if is_grouped else theirs, theirs

    def __str__(self) -> str:
        return self.name

    def options_shown(self) -> list[str]:
        """Names of the options that have other values than their defaults, for docs/support.md."""
        sizes = {"expert": self.ep, "tensor": self.tp}
        shown = [f"{kind}_model_parallel_size" for kind, size in sizes.items() if size > 1]
        shown += self.shows
        if self.etp > 1:
            shown.append("expert_tensor_parallel_size")
        if self.dtype != torch.float64:
            shown.append(f"params_dtype={str(self.dtype).removeprefix('torch.')}")
        if self.te:
            shown.append("transformer_impl=transformer_engine")
        return shown + options_shown(self.options)


def options_shown(options: dict[str, Any]) -> list[str]:
    """Names of these fields of TransformerConfig, and of our options among them.

    A value is part of the name where it is a word: what works with 2 does with 3.
    """
    shown = []
    for name, value in options.items():
        if isinstance(value, EpConfig):
            usual = EpConfig(experts=value.experts).alignment
            for ours, choice in value.non_default().items():
                if ours != "engine" and (ours, choice) != ("alignment", usual):
                    ours = f"--ncclep-{ours.replace('_', '-')}"
                    shown.append(f"{ours}={choice}" if isinstance(choice, str) else ours)
        elif value is not None:
            words = value if isinstance(value, list) else [value]
            shown += [f"{name}={word}" if isinstance(word, str) else name for word in words]
    return shown


def train_on_rank(ctx: RankContext, case: LayerCase, dispatcher: str) -> dict[str, Any]:
    """Forward and backward of a few micro-batches; everything that comes out, by name."""
    with pytest.MonkeyPatch.context() as patch:
        if case.local_ranks is not None:
            patch.setenv("NCCLEP_LOCAL_RANKS", str(case.local_ranks))
        return _train(ctx, case, dispatcher)


def _train(ctx: RankContext, case: LayerCase, dispatcher: str) -> dict[str, Any]:
    initialize(case.ep, case.tp, ctx.device, case.etp)
    options = {"expert_tensor_parallel_size": case.etp, **case.options}
    config = make_config(dispatcher, case.dtype, case.ep, case.tp, **options)
    layer = build_layer(config, ctx.device, case.te)
    if case.integers:
        use_integers(layer, ctx.rank)
    results: dict[str, Any] = {}
    probs_seen: list[torch.Tensor] = []

    def keep_probs(module: Any, inputs: Any, outputs: Any) -> None:
        if outputs[0].requires_grad:  # the first pass of a recomputed layer has no graph
            outputs[0].retain_grad()
            probs_seen.append(outputs[0])

    layer.router.register_forward_hook(keep_probs)
    if 0 in case.sequences + case.evaluation:
        take_empty_batches(layer)
    shape = (case.sequences[ctx.rank] // case.tp, case.batch, config.hidden_size)
    mask = None
    if case.padding:
        mask = torch.zeros(case.batch, shape[0], dtype=torch.bool, device=ctx.device)
        mask[:, -case.padding :] = True
    waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for micro_batch in range(case.micro_batches):
        if case.evaluation:
            results[f"evaluation {micro_batch}"] = evaluate(layer, case, ctx, 7 + micro_batch)
        generator = torch.Generator().manual_seed(97 * micro_batch + ctx.rank)
        hidden, probe = (
            (
                torch.randint(-1, 2, shape, generator=generator)
                if case.integers
                else torch.randn(shape, generator=generator)
            ).to(ctx.device, case.dtype)
            for _ in range(2)
        )
        if case.transposed:
            probe = probe.transpose(0, 1).contiguous().transpose(0, 1)
        out, bias = layer(hidden.requires_grad_(), padding_mask=mask)
        assert bias is None
        waiting.append((hidden, out, probe))
        if not case.in_flight or micro_batch == case.micro_batches - 1:
            for hidden, out, probe in waiting:
                (out * probe).sum().backward()
                index = sum(name.startswith("output") for name in results)
                results[f"output {index}"] = out.detach()
                results[f"input gradient {index}"] = hidden.grad
            waiting.clear()
    for i, probs in enumerate(probs_seen):
        results[f"probability gradient {i}"] = probs.grad
    assert probs_seen
    for name, parameter in layer.named_parameters():
        results[f"gradient of {name}"] = parameter.grad
    dispatcher_used = layer.token_dispatcher
    engine = dispatcher_used.engine.caps.name if dispatcher == "ncclep" else None
    results["dispatcher"] = (type(dispatcher_used).__name__, engine)
    results["experts"] = type(layer.experts).__name__
    return results


@torch.inference_mode()
def evaluate(layer: Any, case: LayerCase, ctx: RankContext, seed: int) -> torch.Tensor:
    """The output for other tokens, without gradients, as an inference engine runs it."""
    generator = torch.Generator().manual_seed(97 * seed + ctx.rank // case.tp)
    shape = (case.evaluation[ctx.rank], case.batch, layer.config.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(ctx.device, case.dtype)
    layer.eval()
    if case.pads_decoding:
        pad_to_capacity(layer, True)
    out, _ = layer(hidden)
    if case.pads_decoding:
        pad_to_capacity(layer, False)
    layer.train()
    return out.clone()


def pad_to_capacity(layer: Any, is_on: bool) -> None:
    """Have Megatron give every expert as many tokens as there are, or end that."""
    from megatron.core.inference import utils

    config = layer.config
    capacity_factor = config.num_moe_experts / config.moe_router_topk if is_on else None
    utils.moe_layer_cache = [layer]  # of the process's one model, to Megatron
    utils.set_decode_expert_padding(layer, is_on, capacity_factor)
    utils.moe_layer_cache = None


def take_empty_batches(layer: Any) -> None:
    """Let the layer's router take a batch without tokens: Megatron's has no view of one, though its
    dispatchers take it.
    """
    route = layer.router.forward

    def route_some(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden.numel():
            return route(hidden, *args, **kwargs)
        probs = hidden.reshape(-1, HIDDEN)[:, :EXPERTS]
        return probs, probs.bool()

    layer.router.forward = route_some


def use_integers(layer: Any, rank: int) -> None:
    """Give the experts whole numbers, and the layer routes with such probabilities, or zero.

    A row of a weight has two entries other than zero, 1 or -1.  The router's own weight gets no
    gradient then.
    """
    for index, (_, parameter) in enumerate(layer.experts.named_parameters()):
        generator = torch.Generator().manual_seed(100 * rank + index)
        columns = torch.rand(parameter.shape, generator=generator).argsort(dim=1)[:, :2]
        signs = 2.0 * torch.randint(0, 2, columns.shape, generator=generator) - 1
        weight = torch.zeros(parameter.shape).scatter(1, columns, signs)
        with torch.no_grad():
            parameter.copy_(weight)
    generator = torch.Generator().manual_seed(1000 + rank)

    def route(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = outputs
        ranked = torch.rand(probs.shape, generator=generator).argsort(dim=1)
        chosen = ranked < layer.config.moe_router_topk
        values = torch.randint(0, 3, probs.shape, generator=generator) * chosen
        return values.to(probs).requires_grad_(), chosen.to(routing_map.device)

    layer.router.register_forward_hook(route)


def assert_same_training(
    ctx: RankContext, case: LayerCase, engine_name: str, train: Any = train_on_rank
) -> None:
    """Compare our dispatcher, over the engine, with `alltoall`: outputs and all gradients."""
    mine, other = (train(ctx, case, dispatcher) for dispatcher in ("ncclep", "alltoall"))
    tolerance = 0.0 if case.integers or case.same_bits else TOLERANCE[case.dtype]
    experts_moved = 0
    assert mine["dispatcher"] == ("NcclEpTokenDispatcher", engine_name)
    assert other["dispatcher"] == ("MoEAlltoAllTokenDispatcher", None)
    assert (mine["experts"], other["experts"]) == case.experts
    assert mine.keys() == other.keys()
    for name in sorted(mine.keys() - {"dispatcher", "experts"}):
        a, b = mine[name], other[name]
        if a is None or b is None:
            # An expert without rows: no gradient, or one of zeros.
            assert not any(t is not None and t.any() for t in (a, b)), name
            continue
        assert a.dtype == b.dtype, name
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        error = (a - b).abs().max().item() / scale if b.numel() else 0.0
        assert error <= tolerance, f"{name}: differs by {error}"
        # Up to 256 a bf16 has every whole number.
        assert not case.integers or b.abs().max() <= 256, name
        experts_moved += "experts" in name and bool(b.any())
    # Not a comparison of zeros: several experts of several ranks were trained.
    tokens = sum(case.sequences[: ctx.num_ranks]) // case.tp * case.batch
    least = min(case.num_experts // case.ep, tokens)
    assert sum(gathered(ctx, experts_moved)) >= least


def assert_overlap_changes_no_bits(ctx: RankContext, case: LayerCase) -> None:
    """Compare a layer whose shared experts overlap (`case`) with the same layer without overlap."""
    options = {**case.options, "moe_shared_expert_overlap": False}
    without = train_on_rank(ctx, dataclasses.replace(case, options=options), "ncclep")
    overlapped = train_on_rank(ctx, case, "ncclep")
    assert without.keys() == overlapped.keys()
    assert sum("shared_experts" in name for name in without) == 3  # fc1, fc2, gate
    for name, value in without.items():
        if name.startswith("input gradient"):
            # Autograd adds what the router, the shared and the routed experts contribute in the
            # order in which they come: two roundings to bf16's 8 bits, in another order.
            scale = value.abs().max().item()
            torch.testing.assert_close(overlapped[name], value, rtol=2**-7, atol=2**-7 * scale)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(overlapped[name], value), name
        else:
            assert overlapped[name] == value, name
